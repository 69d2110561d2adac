"""Compare tensors and named sets of tensors; on failure say how far apart they are, and where most."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny


def difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return the absolute difference in fp64: 0 where both are the same infinity, inf where only one is not finite."""
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    found, expected = found.detach().double(), expected.detach().double()
    return torch.where(found == expected, 0.0, (found - expected).abs().nan_to_num(torch.inf, torch.inf))


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference over the largest entry expected (over 1 where that is 0)."""
    if not expected.numel():
        assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        return 0.0
    scale = float(expected.detach().double().abs().max())
    worst = float(difference(found, expected).max())
    return worst / scale if scale > TINY and scale < torch.inf else worst


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str = "tensor") -> None:
    """Fail, with the worst index, unless `error` is within ``tolerance``."""
    worst = error(found, expected)
    if not worst <= tolerance:
        where = tuple(int(i) for i in torch.unravel_index(difference(found, expected).argmax(), found.shape))
        raise AssertionError(
            f"{name}: relative error {worst:.3e} > {tolerance:.3e}, worst at {where}: "
            f"{found[where].item():.6e}, expected {expected[where].item():.6e}"
        )


def assert_all_close(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float
) -> None:
    """Compare name by name; the names must be the same, and None answers only to None."""
    assert found.keys() == expected.keys(), f"{list(found)}, expected {list(expected)}"
    for name, value in expected.items():
        given = found[name]
        assert (given is None) == (value is None), f"{name}: {given}, expected {value}"
        if given is not None and value is not None:
            assert_close(given, value, tolerance, name)


def assert_same(found: Tensor, expected: Tensor, name: str = "tensor") -> None:
    """Fail unless both are equal bit for bit (and as dtypes), NaN included."""
    assert found.dtype == expected.dtype, f"{name}: {found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{name}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    differs = ~((found == expected) | (found.isnan() & expected.isnan()))
    if differs.any():
        where = tuple(int(i) for i in differs.nonzero()[0])
        raise AssertionError(f"{name}: first difference at {where}: {found[where]!r}, expected {expected[where]!r}")


def assert_zero(found: Tensor | None, name: str = "tensor") -> None:
    """Fail unless every entry is exactly zero (and there is one)."""
    assert found is not None, f"{name} is missing"
    assert found.numel(), f"{name} is empty"
    assert_same(found, torch.zeros_like(found), name)
