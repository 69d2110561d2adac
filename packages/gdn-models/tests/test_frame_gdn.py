"""The three blocks against a transcription with loops over frames: values, every gradient, masks, layouts, dtypes."""

import copy
import pickle

import pytest
import torch
from block_loops import block_by_loops, scale_of, visible_ends
from comparison import assert_close, assert_gradients_close, error, gradients, randomize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gdn_models import BidirectionalGDN, ChunkCausalGDN, FrameGDN

B, F, ROWS, COLUMNS, H, D = 2, 5, 2, 1, 3, 4
C, GRID = H * D, (F, ROWS, COLUMNS)
CLASSES = [
    pytest.param(FrameGDN, "causal", None, id="causal"),
    pytest.param(BidirectionalGDN, "bidirectional", None, id="bidirectional"),
    pytest.param(ChunkCausalGDN, "chunks", (0, 1, 3), id="chunks"),
]
MASK = torch.tensor([[1, 0, 1, 0, 1], [1, 1, 1, 1, 0]]).bool()  # frame 1 and frame 3 start chunks


def make(cls: type[nn.Module], dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    """Return a block with random weights."""
    block = cls(**{"dim": C, "heads": H, **options}).to(dtype)
    randomize(block)
    return block


def expected_of(
    block: nn.Module, x: Tensor, grid: tuple[int, int, int], kind: str, starts: tuple | None, mask: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the transcription's result and the parameters it was computed from, asking for gradients."""
    config = block.config
    parameters = {name: p.detach().clone().requires_grad_() for name, p in block.named_parameters()}
    y = block_by_loops(
        parameters, x, grid, heads=config.heads, ends=visible_ends(kind, starts or (), grid[0]), valid=mask,
        key_scale=scale_of(config.key_scale, config.head_dim, grid[1] * grid[2]), norm_eps=config.norm_eps,
        eps=config.eps, theta=config.rope_theta,
    )  # fmt: skip
    return y, parameters


def check(
    block: nn.Module, kind: str, starts: tuple | None, mask: Tensor | None = None, tolerance: float = 1e-10
) -> None:
    """Compare output, gradient of x and gradients of all parameters with the transcription."""
    keywords = {} if starts is None else {"chunk_starts": starts}
    x = torch.randn(B, F * ROWS * COLUMNS, block.config.dim, dtype=torch.float64, requires_grad=True)
    copied = x.detach().clone().requires_grad_()
    y = block(x, GRID, frame_valid=mask, **keywords)
    expected, parameters = expected_of(block, copied, GRID, kind, starts, mask)
    assert_close(y, expected, tolerance, "output")
    upstream = torch.randn_like(expected)
    y.backward(upstream)
    expected.backward(upstream)
    assert_close(x.grad, copied.grad, tolerance, "gradient of x")
    assert_gradients_close(gradients(block), {name: p.grad for name, p in parameters.items()}, tolerance)


@pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True, "conv_qv": True, "conv_size": 3},
        {"qk_norm": False, "conv_size": 0, "output_gate": False, "rope_theta": None, "eps": 0.5},
        {"conv_size": 1, "key_scale": "dim", "norm_eps": 0.1, "rope_theta": 100.0},
        {"conv_size": 9, "conv_qv": True, "key_scale": "none"},
    ],
    ids=["default", "conv_qv", "bare", "small", "wide"],
)
@pytest.mark.parametrize(("cls", "kind", "starts"), CLASSES)
def test_block_matches_the_transcription(
    cls: type[nn.Module], kind: str, starts: tuple | None, options: dict, mask: Tensor | None
) -> None:
    check(make(cls, **options), kind, starts, mask)


@pytest.mark.parametrize("shape", ["[B, 1, F]", "[B, 1, F, 1, 1]"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_masks_of_every_shape_and_dtype_are_the_same(shape: str, dtype: torch.dtype) -> None:
    block, x = make(BidirectionalGDN), torch.randn(B, F * 2, C, dtype=torch.float64)
    mask = MASK.to(dtype)[:, None] if shape == "[B, 1, F]" else MASK.to(dtype)[:, None, :, None, None]
    assert torch.equal(block(x, GRID, frame_valid=mask), block(x, GRID, frame_valid=MASK))


def test_invalid_frames_may_hold_anything() -> None:
    """Values and gradients of valid frames do not depend on invalid ones, not even on NaN in them; those get zeros."""
    block = make(ChunkCausalGDN, qkv_bias=True, conv_qv=True)
    results = []
    for junk in (0.0, 1e3, float("nan"), float("inf")):
        x = torch.randn(B, F * 2, C, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        x = x.reshape(B, F, 2, C).masked_fill(~MASK[:, :, None, None], junk).reshape(x.shape).requires_grad_()
        block.zero_grad()
        y = block(x, GRID, chunk_starts=(1, 3), frame_valid=MASK)
        (y * torch.arange(C)).sum().backward()
        results.append([y, x.grad, *gradients(block).values()])
        for found in (y, x.grad):
            assert not found.reshape(B, F, -1)[~MASK].any()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("consumer", ["sum", "cut", "permuted"])
def test_strides_of_inputs_and_gradients_do_not_matter(layout: str, consumer: str) -> None:
    """FC-S12, FC-A01."""
    block, n = make(ChunkCausalGDN), F * 2
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
    results = []
    for given in (x, x.contiguous().clone()):
        given = given.detach().requires_grad_()
        block.zero_grad()
        y = block(given, GRID, chunk_starts=(2,), frame_valid=MASK)
        consume(y.clone() if given.is_contiguous() else y).backward()
        results.append([y, given.grad, *gradients(block).values()])
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, 1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("cls", "kind", "starts"), CLASSES)
def test_error_of_low_precision_is_below_that_of_the_formula(
    cls: type[nn.Module], kind: str, starts: tuple | None, dtype: torch.dtype
) -> None:
    """Against fp64 on the same rounded weights, the block errs at most twice as much as its formula in that dtype."""
    block = make(cls, torch.float32).to(dtype)
    exact = copy.deepcopy(block).double()
    keywords = {} if starts is None else {"chunk_starts": starts}
    x = torch.randn(B, F * 2, C).to(dtype).requires_grad_()
    y, wanted = block(x, GRID, **keywords), exact(x.detach().double(), GRID, **keywords)
    narrow = copy.deepcopy(block)
    nn.Module._apply(narrow, lambda p: p.to(dtype))  # the formula in the dtype throughout
    with torch.no_grad():
        for parameter in narrow.parameters():
            parameter.data = parameter.data.to(dtype)
    formula, _ = expected_of(narrow, x.detach(), GRID, kind, starts, None)
    assert y.dtype == dtype
    assert_close(y, wanted, 2 * error(formula, wanted), "output")
    y.float().square().sum().backward()
    assert x.grad.dtype == dtype
    assert all(p.grad.dtype == p.dtype and torch.isfinite(p.grad).all() for p in block.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cls", "kind", "starts"), CLASSES)
def test_autocast_of_an_fp32_block(cls: type[nn.Module], kind: str, starts: tuple | None, dtype: torch.dtype) -> None:
    """FC-A08: forward and backward under autocast; gradients in their inputs' dtypes, near those of 16-bit weights."""
    block, keywords = make(cls, torch.float32), {} if starts is None else {"chunk_starts": starts}
    x = torch.randn(B, F * 2, C, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = block(x, GRID, **keywords)
        loss = y.float().square().mean()
    loss.backward()
    assert y.dtype == dtype
    assert x.grad.dtype == torch.float32
    assert {p.grad.dtype for p in block.parameters()} == {torch.float32}
    exact = copy.deepcopy(block).double()
    exact.zero_grad()
    wanted = exact(x.detach().double(), GRID, **keywords)
    low = copy.deepcopy(block).to(dtype)(x.detach().to(dtype), GRID, **keywords)
    # fp32 weights rounded on the way by autocast: the same roundings as a block of 16-bit weights, and no others
    assert_close(y, wanted, 2 * error(low, wanted))
    with torch.autocast("cpu", dtype):
        assert block(x.to(dtype), GRID, **keywords).dtype == dtype


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_gives_the_same_bits(use_reentrant: bool, autocast: bool) -> None:
    """FC-A10."""
    block = make(ChunkCausalGDN, torch.float32)
    x = torch.randn(B, F * 2, C)
    results = []
    for checkpointed in (False, True):
        given = x.clone().requires_grad_()
        block.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):

            def call(y: Tensor) -> Tensor:
                return block(y, GRID, chunk_starts=(1,), frame_valid=MASK)

            y = checkpoint(call, given, use_reentrant=use_reentrant) if checkpointed else call(given)
        y.float().square().sum().backward()
        results.append([y, given.grad, *gradients(block).values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_grad_and_inference_mode_give_the_same_values() -> None:
    block, x = make(BidirectionalGDN), torch.randn(B, F * 2, C, dtype=torch.float64)
    expected = block(x, GRID)
    with torch.no_grad():
        assert torch.equal(block(x, GRID), expected)
    with torch.inference_mode():
        assert torch.equal(block(x, GRID), expected)


def test_block_copies_and_pickles() -> None:
    block, x = make(ChunkCausalGDN), torch.randn(B, F * 2, C, dtype=torch.float64)
    expected = block(x, GRID, chunk_starts=(2,))
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(other(x, GRID, chunk_starts=(2,)), expected)
