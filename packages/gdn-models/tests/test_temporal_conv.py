"""temporal_conv against explicit pairs of frames, its adjoint, halos and tails, layouts, dtypes, errors."""

import pytest
import torch
from block_loops import conv_by_loops, visible_ends
from comparison import assert_close
from torch import Tensor

from gdn_models.chunks import same_chunk
from gdn_models.temporal_conv import ConvWindow, TemporalConv, temporal_conv

B, S, C = 2, 3, 5
CPU = torch.device("cpu")
KINDS = [("causal", ()), ("bidirectional", ()), ("chunks", (1, 2, 3)), ("chunks", (1, 5)), ("chunks", (4,))]


def window_of(kind: str, starts: tuple[int, ...], frames: int, taps: int) -> ConvWindow:
    seen = same_chunk(starts, 0, frames, taps - 1, CPU) if kind == "chunks" else None
    return ConvWindow(ahead=kind != "causal", same_chunk=seen)


def both(x: Tensor, weight: Tensor, window: ConvWindow, ends: list[int], upstream: Tensor) -> list[tuple]:
    """Return (found, expected) of the result and of both gradients."""
    leaves = [y.detach().clone().requires_grad_() for y in (x, weight)]
    copies = [y.detach().clone().requires_grad_() for y in (x, weight)]
    found, expected = temporal_conv(*leaves, window), conv_by_loops(*copies, ends)
    found.backward(upstream)
    expected.backward(upstream)
    return [(found, expected), *((y.grad, z.grad) for y, z in zip(leaves, copies, strict=True))]


@pytest.mark.parametrize("taps", [1, 2, 4, 9])
@pytest.mark.parametrize("frames", [1, 2, 6])
@pytest.mark.parametrize(("kind", "starts"), KINDS)
def test_temporal_conv_matches_pairs_of_frames(kind: str, starts: tuple[int, ...], frames: int, taps: int) -> None:
    starts = tuple(start for start in starts if start < frames)
    x = torch.randn(B, frames, S, C, dtype=torch.float64)
    weight, upstream = torch.randn(C, 1, taps, dtype=torch.float64), torch.randn_like(x)
    window, ends = window_of(kind, starts, frames, taps), visible_ends(kind, starts, frames)
    for name, (found, expected) in zip(("y", "dx", "dw"), both(x, weight, window, ends, upstream), strict=True):
        assert_close(found, expected, 1e-13, name)


def test_chunk_causal_form_is_causal_plus_flipped_causal_per_chunk_minus_the_centre() -> None:
    x, weight = torch.randn(B, 7, S, C, dtype=torch.float64), torch.randn(C, 1, 4, dtype=torch.float64)
    starts = (2, 3, 6)
    whole = temporal_conv(x, weight, ConvWindow())
    flipped = [
        temporal_conv(x[:, a:b].flip(1), weight, ConvWindow()).flip(1)
        for a, b in zip((0, *starts), (*starts, 7), strict=True)
    ]
    expected = whole + torch.cat(flipped, 1) - x * weight[:, 0, -1]
    assert_close(temporal_conv(x, weight, window_of("chunks", starts, 7, 4)), expected, 1e-13)


@pytest.mark.parametrize("cut", range(8))
@pytest.mark.parametrize(("kind", "starts"), KINDS)
def test_a_cut_with_halos_equals_the_whole(kind: str, starts: tuple[int, ...], cut: int) -> None:
    """FC-S06: neighbours' frames may be fewer than the taps reach; their gradient arrives on them."""
    frames, taps = 7, 4
    x = torch.randn(B, frames, S, C, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(C, 1, taps, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(B, frames, S, C, dtype=torch.float64)
    whole = temporal_conv(x, weight, window_of(kind, starts, frames, taps))
    expected = torch.autograd.grad(whole, (x, weight), upstream)
    pieces = []
    for a, b in ((0, cut), (cut, frames)):
        before, after = min(a, taps - 1), min(frames - b, taps - 1) if kind != "causal" else 0
        seen = same_chunk(starts, a, b - a, taps - 1, CPU) if kind == "chunks" else None
        window = ConvWindow(before, after, kind != "causal", seen)
        pieces.append(temporal_conv(x[:, a - before : b + after], weight, window))
    joined = torch.cat(pieces, 1)
    assert_close(joined, whole, 1e-13)
    for found, wanted in zip(torch.autograd.grad(joined, (x, weight), upstream), expected, strict=True):
        assert_close(found, wanted, 1e-13)


def test_missing_neighbours_are_zeros() -> None:
    x, weight = torch.randn(B, 3, S, C, dtype=torch.float64), torch.randn(C, 1, 4, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 3, 3))
    assert_close(
        temporal_conv(padded, weight, ConvWindow(3, 3, True)), temporal_conv(x, weight, ConvWindow(ahead=True)), 1e-13
    )


def test_causal_form_agrees_with_the_library_convolution() -> None:
    x, weight = torch.randn(B, 6, S, C, dtype=torch.float64), torch.randn(C, 1, 4, dtype=torch.float64)
    rows = torch.nn.functional.pad(x.permute(0, 2, 3, 1).reshape(B * S, C, 6), (3, 0))
    expected = torch.nn.functional.conv1d(rows, weight, groups=C).reshape(B, S, C, 6).permute(0, 3, 1, 2)
    assert_close(temporal_conv(x, weight, ConvWindow()), expected, 1e-13)


def test_initial_weight_is_the_identity_bit_for_bit() -> None:
    conv = TemporalConv(C, 4)
    x = torch.randn(B, 6, S, C)
    for ahead in (False, True):
        assert torch.equal(conv(x, ConvWindow(ahead=ahead)), x)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "offset"])
def test_any_strides_bitwise(layout: str) -> None:
    """FC-S12, FC-A01: views in, strided and expanded gradients back."""
    x = {
        "transposed": lambda: torch.randn(C, S, 6, B).permute(3, 2, 1, 0),
        "sliced": lambda: torch.randn(B, 6, S, 3 * C)[..., C : 2 * C],
        "expanded": lambda: torch.randn(B, 1, S, C).expand(B, 6, S, C),
        "offset": lambda: torch.randn(B * 6 * S * C + 1)[1:].view(B, 6, S, C),
    }[layout]()
    weight = torch.randn(4, 1, C).transpose(0, 2)
    window, ends = window_of("chunks", (2,), 6, 4), [2, 2, 6, 6, 6, 6]
    upstream = torch.randn(B, 1, S, 1).expand(B, 6, S, C)
    strided = both(x, weight, window, ends, upstream)
    plain = both(x.contiguous(), weight.contiguous(), window, ends, upstream.contiguous())
    for (found, _), (expected, _) in zip(strided, plain, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_summed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    frames = 64
    x, weight = torch.randn(B, frames, S, C).to(dtype), torch.randn(C, 1, 4)
    upstream = torch.randn_like(x)
    window, ends = ConvWindow(ahead=True), [frames] * frames
    low = both(x, weight, window, ends, upstream)
    high = both(x.double(), weight.double(), window, ends, upstream.double())
    for (found, _), (expected, _) in zip(low, high, strict=True):
        # one rounding to the dtype of the result, and 7 * B * S * frames fp32 additions for the weight
        unit = torch.finfo(found.dtype).eps
        assert_close(found, expected, unit if found.dtype == dtype else 7 * B * S * frames * unit)


def test_each_gradient_alone() -> None:
    """FC-A05: nothing is computed for what nobody wants, and the other gradient does not change."""
    x, weight = torch.randn(B, 4, S, C), torch.randn(C, 1, 3)
    window = ConvWindow(ahead=True)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = torch.autograd.grad(temporal_conv(*leaves, window).square().sum(), leaves)
    for i, other in enumerate((weight, x)):
        arguments = (leaves[i], other) if i == 0 else (other, leaves[i])
        (found,) = torch.autograd.grad(temporal_conv(*arguments, window).square().sum(), leaves[i])
        assert torch.equal(found, expected[i])


def test_two_backward_calls_agree_and_inputs_stay() -> None:
    """FC-A02."""
    x, weight = torch.randn(B, 4, S, C, requires_grad=True), torch.randn(C, 1, 3, requires_grad=True)
    before = x.detach().clone(), weight.detach().clone()
    y = temporal_conv(x, weight, ConvWindow(ahead=True))
    first = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(before[0], x)
    assert torch.equal(before[1], weight)


@pytest.mark.parametrize("shape", [(0, 3, S, C), (B, 0, S, C), (B, 3, 0, C)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    """FC-S08."""
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(C, 1, 4, requires_grad=True)
    y = temporal_conv(x, weight, ConvWindow(ahead=True, same_chunk=same_chunk((1,), 0, shape[1], 3, CPU)))
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize(
    ("x", "weight", "window", "message"),
    [
        ((B, 3, C), (C, 1, 4), ConvWindow(), r"x must have shape \[B, F, S, C\], got \[2, 3, 5\]"),
        ((B, 3, S, C), (C, 4), ConvWindow(), r"weight must have shape \[C, 1, K\], got \[5, 4\]"),
        ((B, 3, S, C), (C, 2, 4), ConvWindow(), r"weight must have shape \[C, 1, K\] = \[5, 1, 4\], got \[5, 2, 4\]"),
        ((B, 3, S, C), (C, 1, 0), ConvWindow(), r"weight must have shape \[C, 1, K\] = \[5, 1, 1\], got \[5, 1, 0\]"),
        ((B, 3, S, C), (C, 1, 4), ConvWindow(2, 2), r"leave F >= 0 of 3 frames, got before=2, after=2"),
        ((B, 3, S, C), (C, 1, 4), ConvWindow(-1), r"before and after must be >= 0 .* got before=-1, after=0"),
        (
            (B, 3, S, C), (C, 1, 4), ConvWindow(ahead=True, same_chunk=torch.ones(3, 2)),
            r"same_chunk must have shape \[K - 1, F\] = \[3, 3\], got \[3, 2\]",
        ),
    ],
)  # fmt: skip
def test_shape_errors(x: tuple[int, ...], weight: tuple[int, ...], window: ConvWindow, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        temporal_conv(torch.zeros(x), torch.zeros(weight), window)


def test_type_and_dtype_errors() -> None:
    with pytest.raises(TypeError, match="x must be a torch.Tensor, got list"):
        temporal_conv([1.0], torch.zeros(1, 1, 1), ConvWindow())
    with pytest.raises(ValueError, match="x must have dtype float16, bfloat16, float32, float64, got int64"):
        temporal_conv(torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.zeros(1, 1, 1), ConvWindow())


def test_module_shows_channels_and_taps_and_resets() -> None:
    conv = TemporalConv(6, 4, dtype=torch.float64)
    assert repr(conv) == "TemporalConv(6, size=4)"
    assert conv.weight.dtype == torch.float64
    torch.nn.init.normal_(conv.weight)
    conv.reset_parameters()
    assert torch.equal(conv.weight, torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64).expand(6, 1, 4))


def test_second_derivative_raises() -> None:
    """FC-A03."""
    x = torch.randn(1, 2, 1, 1, requires_grad=True)
    y = temporal_conv(x, torch.ones(1, 1, 2), ConvWindow())
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()
