"""Gates: values and gradients against the formulas in fp64, dtypes, autocast, saturation, sizes of nothing."""

import math

import pytest
import torch
from comparison import assert_close
from torch import Tensor

from gdn_models.gates import frame_decay, gate_output, key_scale, wide_dtype, write_strength

B, H, F, ROWS, COLUMNS, C = 2, 3, 5, 2, 3, 7
GRID = (F, ROWS, COLUMNS)


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return gate parameters and an input, all asking for gradients."""
    shapes = {"x": (B, F * ROWS * COLUMNS, C), "weight": (H, C), "bias": (H,), "A_log": (H,), "dt_bias": (H,)}
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for name, shape in shapes.items()}


def beta_formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = torch.einsum("bfsc,hc->bhfs", x.reshape(B, F, -1, C), weight) + bias[:, None, None]
    return 1 / (1 + torch.exp(-logits))


def decay_formula(x: Tensor, weight: Tensor, bias: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    mean = torch.stack([x[:, f * ROWS * COLUMNS : (f + 1) * ROWS * COLUMNS].mean(1) for f in range(F)], 1)
    logits = torch.einsum("bfc,hc->bhf", mean, weight) + (bias + dt_bias)[:, None]
    return torch.exp(-torch.exp(A_log)[:, None] * torch.log(1 + torch.exp(logits)))


def test_write_strength_matches_its_formula_with_gradients() -> None:
    given = [parameters()[name] for name in ("x", "weight", "bias")]
    copies = [x.detach().clone().requires_grad_() for x in given]
    beta, expected = write_strength(*given, GRID), beta_formula(*copies)
    upstream = torch.randn_like(expected)
    beta.backward(upstream)
    expected.backward(upstream)
    assert beta.shape == (B, H, F, ROWS * COLUMNS)
    for found, wanted in [(beta, expected), *((x.grad, y.grad) for x, y in zip(given, copies, strict=True))]:
        assert_close(found, wanted, 1e-13)


def test_frame_decay_matches_its_formula_with_gradients() -> None:
    given = list(parameters().values())
    copies = [x.detach().clone().requires_grad_() for x in given]
    decay, expected = frame_decay(*given, GRID), decay_formula(*copies)
    upstream = torch.randn_like(expected)
    decay.backward(upstream)
    expected.backward(upstream)
    assert decay.shape == (B, H, F)
    for found, wanted in [(decay, expected), *((x.grad, y.grad) for x, y in zip(given, copies, strict=True))]:
        assert_close(found, wanted, 1e-13)


def test_gate_output_matches_its_formula_with_gradients() -> None:
    given = [torch.randn(B, 4, C, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    copies = [x.detach().clone().requires_grad_() for x in given]
    gated, expected = gate_output(*given, torch.float64), copies[0] * copies[1] / (1 + torch.exp(-copies[1]))
    upstream = torch.randn(C, 4, B, dtype=torch.float64).transpose(0, 2)  # strided
    gated.backward(upstream)
    expected.backward(upstream)
    for found, wanted in [(gated, expected), *((x.grad, y.grad) for x, y in zip(given, copies, strict=True))]:
        assert_close(found, wanted, 1e-13)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_of_16_bit_inputs_are_those_of_the_same_values_in_fp32(dtype: torch.dtype, autocast: bool) -> None:
    """FC-N05: gates are fp32 inside whatever the dtype of the module."""
    low = parameters(dtype)
    high = {name: x.detach().float().requires_grad_() for name, x in low.items()}
    results = []
    for given in (low, high):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            beta = write_strength(given["x"], given["weight"], given["bias"], GRID)
            decay = frame_decay(*given.values(), GRID)
        (beta.sum() + decay.square().sum()).backward()
        results.append((beta, decay))
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)
    for name, x in low.items():
        assert x.grad.dtype == dtype
        # rounding once costs half an ulp; the gradient of x is a sum of two rounded terms
        assert_close(x.grad, high[name].grad, 2 * torch.finfo(dtype).eps, name)


def test_gates_backward_under_autocast_stays_wide() -> None:
    given = parameters(torch.float32)
    copies = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    write_strength(given["x"], given["weight"], given["bias"], GRID).sum().backward()
    beta = write_strength(copies["x"], copies["weight"], copies["bias"], GRID)
    with torch.autocast("cpu", torch.bfloat16):
        beta.sum().backward()
    for name in ("x", "weight", "bias"):
        assert torch.equal(given[name].grad, copies[name].grad)


def test_gate_output_rounds_once_and_saves_nothing_wide() -> None:
    output, logits = (torch.randn(3, 5, C).bfloat16().requires_grad_() for _ in range(2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        gated = gate_output(output, logits, torch.bfloat16)
    exact = output.double() * logits.double() / (1 + torch.exp(-logits.double()))
    # half an ulp of the result, and the error of fp32 arithmetic, which is 2 ** -16 of that
    assert ((gated.double() - exact).abs() <= exact.abs() * 2.0**-8 * 1.001).all()
    assert {x.dtype for x in saved} == {torch.bfloat16}


def test_write_strength_saves_the_input_itself() -> None:
    x = torch.randn(B, F * 6, C).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        write_strength(x, torch.randn(H, C), torch.randn(H), GRID)
    wide = [y for y in saved if y.dtype == torch.float32 and y.numel() >= x.numel()]
    assert not wide
    assert any(y.data_ptr() == x.data_ptr() for y in saved)


@pytest.mark.parametrize("A_log", [20.0, -20.0])
@pytest.mark.parametrize("dt_bias", [30.0, -30.0])
def test_decay_is_finite_where_it_saturates(A_log: float, dt_bias: float) -> None:
    """FC-N08: strong and saturated gates keep finite gradients in parameter space."""
    given = parameters(torch.float32)
    with torch.no_grad():
        given["A_log"].fill_(A_log)
        given["dt_bias"].fill_(dt_bias)
    decay = frame_decay(*given.values(), GRID)
    decay.sum().backward()
    exact = [x.detach().double().requires_grad_() for x in given.values()]
    wanted = frame_decay(*exact, GRID)
    wanted.sum().backward()
    assert ((decay >= 0) & (decay <= 1)).all()
    # the exponent is a product of three factors, each within 4 ulp; its error scales with its size, and a gate whose
    # exponent exceeds 100 is zero in fp32 anyway
    exponent = -torch.log(wanted.clamp(min=1e-40)).max().item()
    tolerance = 16 * torch.finfo(torch.float32).eps * (1 + min(exponent, 100.0))
    assert (decay - wanted).abs().max() <= tolerance
    for x, y in zip(given.values(), exact, strict=True):
        assert torch.isfinite(x.grad).all()
        assert (x.grad - y.grad).abs().max() <= tolerance * (1 + y.grad.abs().max())


@pytest.mark.parametrize(
    ("mode", "scale"), [("dim_spatial", 1 / math.sqrt(8 * 6)), ("dim", 1 / math.sqrt(8)), ("none", 1.0)]
)
def test_key_scale_modes(mode: str, scale: float) -> None:
    assert key_scale(mode, 8, GRID) == pytest.approx(scale, rel=1e-15)


@pytest.mark.parametrize("grid", [(0, 2, 3), (4, 0, 3), (0, 0, 0)])
def test_gates_of_nothing_are_finite(grid: tuple[int, int, int]) -> None:
    """FC-S08: no frames, or frames without tokens."""
    given = parameters()
    x = torch.zeros(B, grid[0] * grid[1] * grid[2], C, dtype=torch.float64, requires_grad=True)
    beta = write_strength(x, given["weight"], given["bias"], grid)
    decay = frame_decay(x, *list(given.values())[1:], grid)
    assert beta.shape == (B, H, grid[0], grid[1] * grid[2])
    assert decay.shape == (B, H, grid[0])
    (beta.sum() + decay.sum()).backward()
    assert torch.isfinite(decay).all()
    assert all(torch.isfinite(y.grad).all() for y in given.values() if y.grad is not None)
    assert key_scale("dim_spatial", 8, grid) > 0


def test_wide_dtype() -> None:
    assert wide_dtype(torch.ones(1, dtype=torch.float64)) == torch.float64
    assert {wide_dtype(torch.ones(1, dtype=d)) for d in (torch.float32, torch.float16, torch.bfloat16)} == {
        torch.float32
    }


def test_second_derivative_raises() -> None:
    """FC-A03."""
    given = parameters()
    (dx,) = torch.autograd.grad(
        write_strength(given["x"], given["weight"], given["bias"], GRID).sum(), given["x"], create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()
