"""The three blocks with a camera branch against a transcription with loops: values, every gradient, masks, streams."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from block_loops import block_by_loops, scale_of, visible_ends
from camera_loops import camera_by_loops, poses
from comparison import assert_close, assert_gradients_close, error, gradients, randomize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gdn_models import (
    BidirectionalGDN,
    CameraBidirectionalGDN,
    CameraChunkCausalGDN,
    CameraFrameGDN,
    ChunkCausalGDN,
    FrameGDN,
    GDNState,
    keep_camera,
    ray_transforms,
)

B, F, ROWS, COLUMNS, H, D = 2, 5, 2, 1, 3, 8
C, S, GRID = H * D, ROWS * COLUMNS, (F, ROWS, COLUMNS)
CLASSES = [
    pytest.param(CameraFrameGDN, "causal", None, id="causal"),
    pytest.param(CameraBidirectionalGDN, "bidirectional", None, id="bidirectional"),
    pytest.param(CameraChunkCausalGDN, "chunks", (0, 1, 3), id="chunks"),
]
MASK = torch.tensor([[1, 0, 1, 0, 1], [1, 1, 1, 1, 0]]).bool()  # frame 1 and frame 3 start chunks


def make(cls: type[nn.Module], dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    """Return a block with random weights."""
    block = cls(**{"dim": C, "heads": H, **options}).to(dtype)
    randomize(block)
    return block


def check(
    block: nn.Module, kind: str, starts: tuple | None, camera: Tensor, mask: Tensor | None = None,
    tolerance: float = 1e-10,
) -> None:  # fmt: skip
    """Compare output, gradient of x and gradients of all parameters with the transcription."""
    config, keywords = block.config, {} if starts is None else {"chunk_starts": starts}
    x = torch.randn(B, F * S, config.dim, dtype=torch.float64, requires_grad=True)
    copied = x.detach().clone().requires_grad_()
    y = block(x, GRID, camera, frame_valid=mask, **keywords)
    p = {name: parameter.detach().clone().requires_grad_() for name, parameter in block.named_parameters()}
    options = {
        "heads": config.heads, "ends": visible_ends(kind, starts or (), F), "valid": mask, "theta": config.rope_theta,
        "key_scale": scale_of(config.key_scale, config.head_dim, S), "norm_eps": config.norm_eps,
    }  # fmt: skip
    added = camera_by_loops(p, copied, GRID, camera, patch=config.patch_size, **options)
    expected = block_by_loops(p, copied, GRID, eps=config.eps, added=added, **options)
    assert_close(y, expected, tolerance, "output")
    upstream = torch.randn_like(expected)
    y.backward(upstream)
    expected.backward(upstream)
    assert_close(x.grad, copied.grad, tolerance, "gradient of x")
    assert_gradients_close(gradients(block), {name: parameter.grad for name, parameter in p.items()}, tolerance)


@pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True, "conv_qv": True, "conv_size": 3, "patch_size": (1, 2, 3)},
        {"qk_norm": False, "conv_size": 0, "output_gate": False, "rope_theta": None, "eps": 0.5, "key_scale": "dim"},
        {"conv_size": 1, "norm_eps": 0.1, "rope_theta": 100.0},
        {"conv_size": 9, "conv_qv": True, "key_scale": "none", "dim": 48},
    ],
    ids=["default", "conv_qv", "bare", "small", "wide"],
)
@pytest.mark.parametrize(("cls", "kind", "starts"), CLASSES)
def test_block_matches_the_transcription(
    cls: type[nn.Module], kind: str, starts: tuple | None, options: dict, mask: Tensor | None
) -> None:
    check(make(cls, **options), kind, starts, poses(B, F), mask)


@pytest.mark.parametrize("distance", [0.0, 30.0])
def test_cameras_near_and_far(distance: float) -> None:
    check(make(CameraChunkCausalGDN), "chunks", (0, 1, 3), poses(B, F, distance=distance))


def test_rays_computed_once_are_the_camera() -> None:
    block, x, camera = make(CameraChunkCausalGDN, patch_size=(1, 2, 2)), torch.randn(B, F * S, C).double(), poses(B, F)
    expected = block(x, GRID, camera, chunk_starts=(2,))
    assert torch.equal(block(x, GRID, ray_transforms(camera, GRID, (1, 2, 2)), chunk_starts=(2,)), expected)
    assert not torch.equal(block(x, GRID, ray_transforms(camera, GRID), chunk_starts=(2,)), expected)


@pytest.mark.parametrize(
    ("cls", "plain"),
    [(CameraFrameGDN, FrameGDN), (CameraBidirectionalGDN, BidirectionalGDN), (CameraChunkCausalGDN, ChunkCausalGDN)],
)
def test_without_a_camera_the_block_is_the_one_without_a_branch(cls: type[nn.Module], plain: type[nn.Module]) -> None:
    """Values, gradients and the absence of gradients of the branch."""
    block, x = make(cls), torch.randn(B, F * S, C, dtype=torch.float64)
    other = plain(dim=C, heads=H).double()
    other.load_state_dict({name: value for name, value in block.state_dict().items() if "_cam" not in name})
    found, expected = block(x, GRID, frame_valid=MASK), other(x, GRID, frame_valid=MASK)
    assert torch.equal(found, expected)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    for name, parameter in block.named_parameters():
        assert ("_cam" in name) == (parameter.grad is None), name
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, other.get_parameter(name).grad)


def test_moving_the_world_changes_nothing() -> None:
    """Every camera moved by the same rigid motion; far motions change inflation and are not tried."""
    block, x, camera = make(CameraBidirectionalGDN), torch.randn(B, F * S, C, dtype=torch.float64), poses(B, F)
    turn = poses(1, 1, distance=0.0, seed=4)[0, 0, :16].reshape(4, 4)
    moved = camera.clone()
    moved[..., :16] = (turn @ camera[..., :16].reshape(B, F, 4, 4)).flatten(-2)
    assert_close(block(x, GRID, moved), block(x, GRID, camera), 1e-12)
    moved[0, 0, 3] += 1  # one camera alone
    assert error(block(x, GRID, moved), block(x, GRID, camera)) > 1e-4


def test_invalid_frames_may_hold_anything_and_any_camera() -> None:
    block = make(CameraChunkCausalGDN, qkv_bias=True, conv_qv=True)
    results = []
    for junk in (0.0, 1e3, 1e200, float("nan"), float("inf")):
        x = torch.randn(B, F * S, C, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        x = x.reshape(B, F, S, C).masked_fill(~MASK[:, :, None, None], junk).reshape(x.shape).requires_grad_()
        camera = poses(B, F).masked_fill(~MASK[:, :, None], junk)
        block.zero_grad()
        for given in (camera, ray_transforms(camera, GRID)):
            y = block(x, GRID, given, chunk_starts=(1, 3), frame_valid=MASK)
            (y * torch.arange(C)).sum().backward()
            results.append(y)
        results[-1] = (results[-1], x.grad, *gradients(block).values())
        for found in (y, x.grad):
            assert not found.reshape(B, F, -1)[~MASK].any()
    for one, whole in zip(results[2::2], results[3::2], strict=True):
        assert torch.equal(one, results[0])
        assert all(torch.equal(a, b) for a, b in zip(whole, results[1], strict=True))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("consumer", ["sum", "cut", "permuted"])
def test_strides_of_inputs_and_gradients_do_not_matter(layout: str, consumer: str) -> None:
    """FC-S12, FC-A01."""
    block, n = make(CameraChunkCausalGDN), F * S
    x = {
        "transposed": lambda: torch.randn(n, C, B, dtype=torch.float64).permute(2, 0, 1),
        "sliced": lambda: torch.randn(B, n, 2 * C, dtype=torch.float64)[..., ::2],
        "expanded": lambda: torch.randn(1, n, C, dtype=torch.float64).expand(B, n, C),
    }[layout]()
    consume = {
        "sum": lambda y: y.sum(),
        "cut": lambda y: (torch.cat((y[:, 3:], y[:, :3]), 1) * torch.arange(C)).square().sum(),
        "permuted": lambda y: (y.permute(2, 0, 1) * torch.arange(n)).sum(),
    }[consumer]
    wide = torch.stack((poses(B, F), poses(B, F, seed=2)), -1)
    results = []
    for given, camera in ((x, wide[..., 0]), (x.contiguous().clone(), wide[..., 0].contiguous())):
        given = given.detach().requires_grad_()
        block.zero_grad()
        y = block(given, GRID, camera, chunk_starts=(2,), frame_valid=MASK)
        consume(y.clone() if given.is_contiguous() else y).backward()
        results.append([y, given.grad, *gradients(block).values()])
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, 1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("cls", "kind", "starts"), CLASSES)
def test_error_of_low_precision_is_below_that_of_the_formula(
    cls: type[nn.Module], kind: str, starts: tuple | None, dtype: torch.dtype
) -> None:
    """Against fp64 on the same rounded weights, a block errs at most twice as much as its formula in that dtype.

    Autocast of the weights in fp32 rounds what the block of narrow weights has rounded already, and nothing else.
    """
    block = make(cls, torch.float32)
    low, camera, keywords = (
        copy.deepcopy(block).to(dtype),
        poses(B, F),
        {} if starts is None else {"chunk_starts": starts},
    )
    x = torch.randn(B, F * S, C).to(dtype).requires_grad_()
    y, wanted = low(x, GRID, camera, **keywords), copy.deepcopy(low).double()(x.double(), GRID, camera, **keywords)
    p = {name: parameter.detach().to(dtype) for name, parameter in low.named_parameters()}
    options = {
        "heads": H, "ends": visible_ends(kind, starts or (), F), "key_scale": scale_of("dim_spatial", D, S),
        "norm_eps": block.config.norm_eps,
    }  # fmt: skip
    added = camera_by_loops(p, x.detach(), GRID, camera, **options)
    formula = block_by_loops(p, x.detach(), GRID, added=added, **options)
    assert y.dtype == dtype
    assert_close(y, wanted, 2 * error(formula, wanted))
    y.float().square().mean().backward()
    assert x.grad.dtype == dtype
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in low.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cls", "kind", "starts"), CLASSES)
def test_autocast_of_an_fp32_block(cls: type[nn.Module], kind: str, starts: tuple | None, dtype: torch.dtype) -> None:
    """FC-A08: forward and backward under autocast; gradients in their inputs' dtypes, near those of 16-bit weights."""
    block, camera, keywords = make(cls, torch.float32), poses(B, F), {} if starts is None else {"chunk_starts": starts}
    x = torch.randn(B, F * S, C, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = block(x, GRID, camera, **keywords)
        loss = y.float().square().mean()
    loss.backward()
    assert y.dtype == dtype
    assert {x.grad.dtype, *(p.grad.dtype for p in block.parameters())} == {torch.float32}
    wanted = copy.deepcopy(block).double()(x.detach().double(), GRID, camera, **keywords)
    low = copy.deepcopy(block).to(dtype)(x.detach().to(dtype), GRID, camera, **keywords)
    # fp32 weights rounded on the way by autocast: the same roundings as a block of 16-bit weights, and no others
    assert_close(y, wanted, 2 * error(low, wanted))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(use_reentrant: bool) -> None:
    """FC-A10."""
    block, x, camera, results = make(CameraChunkCausalGDN, torch.float32), torch.randn(B, F * S, C), poses(B, F), []

    def call(y: Tensor) -> Tensor:
        return block(y, GRID, camera.float(), chunk_starts=(1,), frame_valid=MASK)

    for checkpointed in (False, True):
        given = x.clone().requires_grad_()
        block.zero_grad()
        y = checkpoint(call, given, use_reentrant=use_reentrant) if checkpointed else call(given)
        y.square().sum().backward()
        results.append([y, given.grad, *gradients(block).values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_block_copies_and_pickles() -> None:
    block, x, camera = make(CameraBidirectionalGDN), torch.randn(B, F * S, C, dtype=torch.float64), poses(B, F)
    expected = block(x, GRID, camera)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(other(x, GRID, camera), expected)


# ---- streams


def stream(
    block: nn.Module, x: Tensor, camera: Tensor, cuts: list[int], starts: tuple | None
) -> tuple[Tensor, GDNState]:
    state, outputs = block.init_state(B, (0, ROWS, COLUMNS)), []
    for first, last in pairwise([0, *cuts]):
        own = {} if starts is None else {"chunk_starts": [s - first for s in starts if first <= s < last]}
        y, state = block(
            x[:, first * S : last * S], (last - first, ROWS, COLUMNS), camera[:, first:last], state=state, **own
        )
        outputs.append(y)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("conv", [{}, {"conv_qv": True}, {"conv_size": 0}], ids=["k", "qkv", "none"])
@pytest.mark.parametrize(
    ("cls", "starts", "cuts"),
    [
        (CameraFrameGDN, None, [1, 3, 4, 7]),  # calls of 1, 2, 1 and 3 frames
        (CameraFrameGDN, None, [0, 7, 7]),
        (CameraChunkCausalGDN, (0, 1, 3, 4), [1, 3, 4, 7]),
        (CameraChunkCausalGDN, (0, 1, 3, 4), [3, 7]),
    ],
)
def test_a_stream_with_cameras_equals_one_call(cls: type[nn.Module], starts: tuple, cuts: list, conv: dict) -> None:
    """Row 10: both tails stay full for calls shorter than the convolution's reach; gradients through all states."""
    check_stream(make(cls, **conv), starts, cuts)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("cls", [CameraFrameGDN, CameraChunkCausalGDN])
def test_a_stream_of_chunks_with_cameras_equals_one_call(cls: type[nn.Module], length: int) -> None:
    """Row 10: chunks shorter than, as long as and longer than the taps, the last of them cut off."""
    starts = tuple(range(0, 7, length))
    block = make(cls, conv_qv=True)
    check_stream(block, starts if cls is CameraChunkCausalGDN else None, [*starts[1:], 7])


def check_stream(block: nn.Module, starts: tuple | None, cuts: list[int]) -> None:
    """Compare a clip of 7 frames cut into calls with the same clip in one: outputs, states and all gradients."""
    camera = poses(B, 7)
    whole, x = copy.deepcopy(block), torch.randn(B, 7 * S, C, dtype=torch.float64, requires_grad=True)
    copied = x.detach().clone().requires_grad_()
    y, state = stream(block, x, camera, cuts, starts)
    expected, final = stream(whole, copied, camera, [7], starts)
    keywords = {} if starts is None else {"chunk_starts": starts}
    assert_close(expected, whole(copied, (7, ROWS, COLUMNS), camera, **keywords), 1e-10)
    assert_close(y, expected, 1e-10)
    upstream, losses = torch.randn_like(y), []
    ends = [[s.kv, s.z, *s.conv, s.camera.kv, *s.camera.conv] for s in (state, final)]
    for one, other in zip(*ends, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other, 1e-10)
    for result, end in ((y, ends[0]), (expected, ends[1])):
        losses.append((result * upstream).sum() + sum(part.square().sum() for part in end if part is not None))
        losses[-1].backward()
    assert_close(x.grad, copied.grad, 1e-10)
    assert_gradients_close(gradients(block), gradients(whole), 1e-10)


def test_a_stream_without_cameras_has_no_camera_state() -> None:
    block, x = make(CameraFrameGDN), torch.randn(B, F * S, C, dtype=torch.float64)
    state = block.init_state(B, (0, ROWS, COLUMNS), camera=False)
    assert state.camera is None
    y, state = block(x, GRID, state=state)
    assert state.camera is None
    assert_close(y, block(x, GRID), 1e-12)


# ---- branch dropout


def test_keep_camera_is_a_function_of_its_arguments_with_the_rate_asked_for() -> None:
    for p in (0.1, 0.5, 0.9):
        kept = [keep_camera(p, 7, step, layer) for step in range(400) for layer in range(20)]
        assert kept == [keep_camera(p, 7, step, layer) for step in range(400) for layer in range(20)]
        deviation = (p * (1 - p) / len(kept)) ** 0.5
        assert abs(sum(kept) / len(kept) - (1 - p)) < 4 * deviation
    for p, expected in ((0.0, True), (-1, True), (1, False), (2.5, False)):
        assert {keep_camera(p, 3, step, 0) for step in range(100)} == {expected}


@pytest.mark.parametrize("axis", ["seed", "step", "layer"])
def test_neighbouring_seeds_steps_and_layers_decide_independently(axis: str) -> None:
    base = {"seed": 5, "step": 6, "layer": 7}
    decisions = [keep_camera(0.5, **{**base, axis: value}) for value in range(-1000, 1000)]
    agreeing = sum(a == b for a, b in pairwise(decisions))
    assert abs(agreeing - 1000) < 4 * 500**0.5
    assert keep_camera(0.5, 1, 2, 3) is keep_camera(0.5, seed=1, step=2, layer=3)
    assert len({tuple(keep_camera(0.5, *order, step) for step in range(64)) for order in ((1, 2), (2, 1))}) == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("0.5", 0, 0, 0), TypeError, "^p must be a number, got str$"),
        ((True, 0, 0, 0), TypeError, "^p must be a number, got bool$"),
        ((float("nan"), 0, 0, 0), ValueError, "^p must not be NaN$"),
        ((0.5, 0.0, 0, 0), TypeError, "^seed must be an int, got float$"),
        ((0.5, 0, torch.tensor(0), 0), TypeError, "^step must be an int, got Tensor$"),
        ((0.5, 0, 0, None), TypeError, "^layer must be an int, got NoneType$"),
    ],
)
def test_keep_camera_refuses(arguments: tuple, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        keep_camera(*arguments)
