"""What published implementations got wrong, one test each: chunks, masks, scales, signs, sizes, dtypes, gradients.

Weights are random throughout: at their initial values an identity convolution and constant gates hide most of this.
"""

import copy

import block_loops
import pytest
import torch
from block_loops import block_by_loops, scale_of, visible_ends
from comparison import assert_close, error, gradients, randomize
from torch import Tensor, nn

from gdn_models import BidirectionalGDN, ChunkCausalGDN, FrameGDN, chunk_schedule

H, D, ROWS, COLUMNS = 2, 6, 1, 2
C, S = H * D, ROWS * COLUMNS
CLASSES = [
    pytest.param(FrameGDN, "causal", id="causal"),
    pytest.param(BidirectionalGDN, "bidirectional", id="bidirectional"),
    pytest.param(ChunkCausalGDN, "chunks", id="chunks"),
]


def make(cls: type[nn.Module], dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    """Return a block whose weights depend on their shapes alone."""
    torch.manual_seed(1)
    block = cls(**{"dim": C, "heads": H, "qkv_bias": True, "conv_qv": True, **options}).to(dtype)
    randomize(block)
    return block


def clip(frames: int, batch: int = 1, channels: int = C, spatial: int = S) -> Tensor:
    return torch.randn(batch, frames * spatial, channels, dtype=torch.float64)


def loops(block: nn.Module, x: Tensor, kind: str, starts: tuple[int, ...] = (), **options: object) -> Tensor:
    """Run the transcription on ``x [B, F*S, C]`` of the module grid."""
    config, frames = block.config, x.shape[1] // S
    return block_by_loops(
        dict(block.named_parameters()), x, (frames, ROWS, COLUMNS), heads=config.heads,
        ends=visible_ends(kind, starts, frames), key_scale=scale_of(config.key_scale, config.head_dim, S),
        norm_eps=config.norm_eps, eps=config.eps, theta=config.rope_theta, **options,
    )  # fmt: skip


def changed_frames(block: nn.Module, x: Tensor, frame: int, starts: tuple[int, ...] | None) -> list[int]:
    """Return the frames whose output changes, in any bit, when ``frame`` of the input does."""
    frames = x.shape[1] // S
    keywords = {} if starts is None else {"chunk_starts": starts}
    other = x.clone()
    other[:, frame * S : (frame + 1) * S] += 1
    difference = block(x, (frames, ROWS, COLUMNS), **keywords) != block(other, (frames, ROWS, COLUMNS), **keywords)
    return difference.reshape(x.shape[0], frames, -1).any(-1).any(0).nonzero().flatten().tolist()


# ---- chunks


@pytest.mark.parametrize("starts", [None, (0,), (), chunk_schedule(7, 9)])
def test_a_clip_of_one_chunk_equals_the_bidirectional_block(starts: tuple[int, ...] | None) -> None:
    block, x, mask = make(ChunkCausalGDN), clip(7, 2), torch.tensor([[1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])
    other = BidirectionalGDN(block.config).double()
    other.load_state_dict(block.state_dict())
    for valid in (None, mask.bool()):
        found = block(x, (7, ROWS, COLUMNS), chunk_starts=starts, frame_valid=valid)
        assert torch.equal(found, other(x, (7, ROWS, COLUMNS), frame_valid=valid))


@pytest.mark.parametrize("starts", [(0, 1, 5, 9), (1, 5, 9), [0, 1, 5, 9]])
def test_an_explicit_start_list_means_what_it_says(starts: tuple[int, ...] | list[int]) -> None:
    """F = 12 is divisible by a chunk size of 4, which must not tempt anything to cut there."""
    block, x = make(ChunkCausalGDN), clip(12)
    found = block(x, (12, ROWS, COLUMNS), chunk_starts=starts)
    assert_close(found, loops(block, x, "chunks", (1, 5, 9)), 1e-10)
    bounds = [0, 1, 5, 9, 12]
    for first, stop in zip(bounds, bounds[1:], strict=False):
        for frame in range(first, stop):
            assert changed_frames(block, x, frame, tuple(starts)) == list(range(first, 12))


def test_chunks_of_one_frame_work_and_alone_are_the_causal_block() -> None:
    block, x, grid = make(ChunkCausalGDN), clip(6), (6, ROWS, COLUMNS)
    found = block(x, grid, chunk_starts=(0, 1, 2, 3))
    assert_close(found, loops(block, x, "chunks", (1, 2, 3)), 1e-10)
    causal = FrameGDN(block.config).double()
    causal.load_state_dict(block.state_dict())
    assert_close(block(x, grid, chunk_starts=tuple(range(6))), causal(x, grid), 1e-12)


@pytest.mark.parametrize("frame", [0, 3, 6])
def test_a_frame_reaches_exactly_the_frames_that_may_see_it(frame: int) -> None:
    x = clip(7)
    assert changed_frames(make(FrameGDN), x, frame, None) == list(range(frame, 7))
    assert changed_frames(make(BidirectionalGDN), x, frame, None) == list(range(7))
    assert changed_frames(make(ChunkCausalGDN), x, frame, (2, 4)) == list(range({0: 0, 3: 2, 6: 4}[frame], 7))


# ---- masks


@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_right_padding_changes_nothing(cls: type[nn.Module], kind: str) -> None:
    """With a start inside the padding as well, and padding that holds large numbers."""
    block, x = make(cls), clip(5, 2).requires_grad_()
    starts = (2, 5, 6) if kind == "chunks" else None
    valid = (torch.arange(8) < 5).expand(2, 8)
    padded = torch.cat((x, 1e3 * clip(3, 2)), 1)
    keywords = {} if starts is None else {"chunk_starts": starts}
    found = block(padded, (8, ROWS, COLUMNS), frame_valid=valid, **keywords)
    expected = block(x, (5, ROWS, COLUMNS), **({} if starts is None else {"chunk_starts": (2,)}))
    assert_close(found[:, : 5 * S], expected, 1e-12)
    assert not found[:, 5 * S :].any()
    upstream = torch.randn_like(found)
    dx = torch.autograd.grad(found, (x, *block.parameters()), upstream)
    for gradient, wanted in zip(
        dx, torch.autograd.grad(expected, (x, *block.parameters()), upstream[:, : 5 * S]), strict=True
    ):
        assert_close(gradient, wanted, 1e-12)


@pytest.mark.parametrize("frame", range(6))
@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_a_reset_survives_an_invalid_frame_at_a_chunk_start(cls: type[nn.Module], kind: str, frame: int) -> None:
    starts = (2, 4) if kind == "chunks" else ()
    block, x = make(cls), clip(6)
    valid = torch.ones(1, 6, dtype=torch.bool)
    valid[0, frame] = False
    keywords = {"chunk_starts": starts} if starts else {}
    found = block(x, (6, ROWS, COLUMNS), frame_valid=valid, **keywords)
    assert_close(found, loops(block, x, kind, starts, valid=valid), 1e-10)


# ---- scales, signs


@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_key_scale_is_honoured(cls: type[nn.Module], kind: str) -> None:
    x, results = clip(4), []
    for mode in ("dim_spatial", "dim", "none"):
        block = make(cls, key_scale=mode)
        results.append(block(x, (4, ROWS, COLUMNS)))
        assert_close(results[-1], loops(block, x, kind), 1e-10, mode)
    for i in range(3):
        assert error(results[i], results[i - 1]) > 1e-3


@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_a_negative_denominator_is_divided_by(cls: type[nn.Module], kind: str) -> None:
    """No clamp, absolute value or guard: out = num / (den + eps) whatever the sign of den."""
    block = make(cls, qk_norm=False, key_scale="none", output_gate=False, rope_theta=None)
    x = clip(12)
    numerator, denominator = (y.detach() for y in loops(block, x, kind, raw=True))
    assert (denominator < -1e-3).any(), "the case must have negative denominators"
    found = block(x, (12, ROWS, COLUMNS))
    out = (numerator / (denominator + block.config.eps)[..., None]).reshape(x.shape)
    # judged on numerator and denominator: an error of 1e-12 of the largest is amplified where the denominator is small
    amplified = 1e-12 * denominator.abs().max() / denominator.abs().min() + 1e-12
    assert_close(found, out @ block.proj.weight.T + block.proj.bias, float(amplified))


def test_an_empty_past_gives_zeros_and_not_nan() -> None:
    """Numerator and denominator 0: the output is 0 / eps."""
    block = make(BidirectionalGDN, conv_size=0, conv_qv=False, qkv_bias=False)
    with torch.no_grad():
        block.beta_proj.bias.fill_(-1000)  # beta = 0: nothing is ever written
    assert torch.equal(block(clip(3), (3, ROWS, COLUMNS)), block.proj.bias.expand(1, 3 * S, C))


def test_norm_eps_reaches_the_operator() -> None:
    x, results = clip(4), []
    for norm_eps in (1e-5, 0.1, 10.0):
        block = make(BidirectionalGDN, norm_eps=norm_eps)
        results.append(block(x, (4, ROWS, COLUMNS)))
        assert_close(results[-1], loops(block, x, "bidirectional"), 1e-10)
    assert min(error(results[0], results[1]), error(results[1], results[2])) > 1e-3


def test_a_checkpoint_without_norms_loads_without_qk_norm_only() -> None:
    state = make(FrameGDN, qk_norm=False).state_dict()
    FrameGDN(dim=C, heads=H, qkv_bias=True, conv_qv=True, qk_norm=False).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "q_norm.weight", "k_norm.weight"'):
        FrameGDN(dim=C, heads=H, qkv_bias=True, conv_qv=True).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "recall_gate"'):
        FrameGDN(dim=C, heads=H, qkv_bias=True, conv_qv=True, qk_norm=False).load_state_dict(
            {**state, "recall_gate": torch.zeros(1)}
        )


# ---- sizes


@pytest.mark.parametrize("width", [2, 8, 10, 40, 72, 112, 256])
@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_head_widths_that_are_no_power_of_two(cls: type[nn.Module], kind: str, width: int) -> None:
    """FC-S16."""
    block = make(cls, dim=H * width)
    x = clip(3, channels=H * width).requires_grad_()
    copied = x.detach().clone().requires_grad_()
    found, expected = block(x, (3, ROWS, COLUMNS)), loops(block, copied, kind)
    assert_close(found, expected, 1e-10)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    assert_close(x.grad, copied.grad, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 0, 2, 2), (0, 3, 2, 2), (2, 1, 2, 2), (2, 3, 1, 1), (2, 1, 1, 1), (2, 3, 0, 2)])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_smallest_sizes_run_forward_and_backward(
    cls: type[nn.Module], kind: str, heads: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """FC-S04, FC-S08: (B, F, h, w) with nothing, or one thing, in it."""
    batch, *grid = shape
    block = make(cls, dtype, heads=heads)
    x = torch.randn(batch, grid[0] * grid[1] * grid[2], C, dtype=dtype, requires_grad=True)
    valid = torch.ones(batch, grid[0], dtype=torch.bool)
    for mask in (None, valid):
        block.zero_grad()
        y = block(x, tuple(grid), frame_valid=mask)
        assert y.shape == x.shape
        assert torch.isfinite(y).all()
        (y.float() ** 2).sum().backward()
        assert x.grad.shape == x.shape
        assert torch.isfinite(x.grad).all()
        assert all(torch.isfinite(gradient).all() for gradient in gradients(block).values())


def test_one_frame_reads_itself_alone_in_every_class() -> None:
    x = clip(1, 2)
    results = []
    for cls in (FrameGDN, BidirectionalGDN, ChunkCausalGDN):
        block = make(cls)
        results.append(block(x, (1, ROWS, COLUMNS)))
    assert_close(results[1], results[0], 1e-13)
    assert_close(results[2], results[0], 1e-13)


# ---- dtypes


@pytest.mark.parametrize("autocast", [False, True])
def test_error_of_16_bits_does_not_grow_with_the_clip(autocast: bool) -> None:
    """FC-N05: gates of 0.9933 rounded to 16 bits would be 0.9922, and 13 % off after 120 frames."""
    block = FrameGDN(dim=C, heads=H)
    randomize(block)
    with torch.no_grad():
        block.beta_proj.bias.fill_(-2.0)  # writes little
        block.dt_bias.fill_(-5.0)  # and remembers long
        block.gate_proj.weight.zero_()
        block.gate_proj.bias.zero_()
        block.A_log.zero_()
    if not autocast:
        block.bfloat16()
    exact = copy.deepcopy(block).double()
    errors = {}
    for frames in (11, 120):
        x = torch.randn(16, frames * S, C, generator=torch.Generator().manual_seed(frames)).bfloat16()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = block(x, (frames, ROWS, COLUMNS)).double()[:, -S:]
        wanted = exact(x.double(), (frames, ROWS, COLUMNS)).detach()[:, -S:]
        errors[frames] = float((y - wanted).norm() / wanted.norm())
    assert errors[120] < 1.5 * errors[11], errors


def test_gradient_norm_of_sixteen_layers_in_16_bits_is_within_one_percent() -> None:
    """FC-A11: one training step of a deep bidirectional stack, in bf16 weights and under autocast.

    The reference has the same bf16 numbers in its weights: SiLU of the output gate's bias alone, 1.2785 rounded to
    1.28125, is 0.3 percent too much in every layer.
    """
    stack = nn.ModuleList(BidirectionalGDN(dim=64, heads=2) for _ in range(16)).bfloat16()
    x, norms = torch.randn(2, 6 * S, 64).bfloat16(), []
    for dtype, autocast in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        layers, y = copy.deepcopy(stack).to(dtype), x.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for layer in layers:
                y = y + layer(nn.functional.layer_norm(y, (64,)), (6, ROWS, COLUMNS))
        y.float().square().mean().backward()
        norms.append(torch.stack([g.float().norm() for g in gradients(layers).values()]).norm().item())
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=0.01)


# ---- gradients


@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_every_parameter_gets_the_gradient_that_finite_differences_give(cls: type[nn.Module], kind: str) -> None:
    block, x = make(cls), clip(5, 2)
    keywords = {"chunk_starts": (2, 3)} if kind == "chunks" else {}
    upstream = torch.randn_like(x)

    def loss() -> Tensor:
        return (block(x, (5, ROWS, COLUMNS), **keywords) * upstream).sum()

    loss().backward()
    step = 1e-6
    for name, gradient in gradients(block).items():
        parameter = block.get_parameter(name)
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            parameter += step * direction
            above = loss()
            parameter -= 2 * step * direction
            below = loss()
            parameter += step * direction
        slope, expected = (above - below) / (2 * step), (gradient * direction).sum()
        # rounding of the two losses over the step, and the cubic term of the expansion
        tolerance = float(2**-52 * (above.abs() + below.abs()) * 100 / step + 1e-6 * gradient.norm() * direction.norm())
        assert abs(slope - expected) < tolerance, f"{name}: {float(slope)} against {float(expected)}"
        assert gradient.abs().max() > 0, name


def test_frozen_parameters_get_nothing_and_change_nothing() -> None:
    block, x = make(BidirectionalGDN), clip(4)
    block(x, (4, ROWS, COLUMNS)).square().sum().backward()
    expected = gradients(block)
    for name, parameter in block.named_parameters():
        block.zero_grad()
        for other in block.parameters():
            other.requires_grad_(other is parameter)
        block(x, (4, ROWS, COLUMNS)).square().sum().backward()
        found = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
        assert list(found) == [name]
        assert_close(found[name], expected[name], 1e-13, name)


# ---- decays of exactly 0


@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_decays_of_zero_have_their_gradient(monkeypatch: pytest.MonkeyPatch, cls: type[nn.Module], kind: str) -> None:
    """Gates of exactly 0, exactly 1 and between, as leaves, through the whole block."""
    block, x, starts = make(cls), clip(6), (2, 3) if kind == "chunks" else ()
    beta = torch.rand(1, H, 6, S, dtype=torch.float64)
    decay = torch.tensor([[0.9, 0.0, 1.0, 0.9, 0.0, 1.0], [1.0, 0.9, 0.9, 0.0, 0.0, 0.9]], dtype=torch.float64)[None]
    leaves = [decay.clone().requires_grad_() for _ in range(2)]
    monkeypatch.setattr(block, "_gates", lambda y, c: (beta, leaves[0]))
    monkeypatch.setattr(block_loops, "gates_by_loops", lambda p, y: (beta, leaves[1]))
    found = block(x, (6, ROWS, COLUMNS), **({"chunk_starts": starts} if starts else {}))
    expected = loops(block, x, kind, starts)
    assert_close(found, expected, 1e-10)
    upstream = torch.randn_like(found)
    for result in (found, expected):
        result.backward(upstream)
    assert_close(leaves[0].grad, leaves[1].grad, 1e-10)
    assert leaves[0].grad[decay == 0].abs().max() > 1e-6, "a decay of 0 has a gradient"
