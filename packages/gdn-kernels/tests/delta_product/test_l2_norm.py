"""Unit length, and its gradient by hand against autograd through the formula."""

import pytest
import torch
from agreement import assert_close, assert_same

from gdn_kernels import l2_normalize


def formula(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x over the root of its squared length plus eps, for autograd."""
    return x / torch.sqrt(torch.einsum("...i,...i->...", x, x) + eps)[..., None]


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_value_and_gradient_are_those_of_the_formula(eps: float) -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64).transpose(1, 3).requires_grad_()
    found, expected = l2_normalize(x, eps), formula(x, eps)
    assert_close(found, expected, 1e-14)
    dy = torch.randn(5, 3, 4, 2, dtype=torch.float64).permute(3, 0, 2, 1)
    assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (found, expected)), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_result_and_gradient_are_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(6, 40).to(dtype).requires_grad_()
    y = l2_normalize(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    wide = x.detach().double().requires_grad_()
    expected = formula(wide, 1e-6)
    (dwide,) = torch.autograd.grad(expected, wide, torch.ones_like(expected))
    tolerance = torch.finfo(dtype).eps / 2 + 40 * torch.finfo(torch.float32).eps  # a rounding, and 40 terms in fp32
    for found, exact in ((y, expected), (dx, dwide)):
        assert found.dtype == dtype
        assert_close(found, exact, tolerance)


def test_zero_vectors_stay_zero_with_a_finite_gradient() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    y = l2_normalize(x)
    assert_same(y, torch.zeros(2, 3))
    y.sum().backward()
    assert_close(x.grad, torch.full((2, 3), 1e3), 1e-6)


def test_it_is_once_differentiable() -> None:
    x = torch.randn(3, requires_grad=True)
    (dx,) = torch.autograd.grad(l2_normalize(x).square()[0], x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()


@pytest.mark.parametrize(
    "x, eps, kind, message",
    [
        ([1.0], 1e-6, TypeError, "^x must be a torch.Tensor, got list$"),
        (torch.ones(3).long(), 1e-6, ValueError, "^x must have dtype float16, bfloat16, float32, float64, got int64$"),
        (torch.tensor(1.0), 1e-6, ValueError, r"^x must have shape \[\.\.\., K\], got \[\]$"),
        (torch.ones(3), 0.0, ValueError, "^eps must be a finite number > 0, got 0.0$"),
        (torch.ones(3), "a", TypeError, "^eps must be a number, got str 'a'$"),
    ],
)
def test_refusals_say_what_is_wrong(x: object, eps: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        l2_normalize(x, eps)
