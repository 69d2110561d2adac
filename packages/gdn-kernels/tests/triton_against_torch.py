"""Run a case through both implementations: Triton's results and gradients against torch in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from agreement import assert_all_close, assert_zero, error
from frame_gdn_cases import NO_GRADIENT, Case, Results, gradients, run, upstream
from torch import Tensor

Strided = Callable[[Tensor], Tensor]


def as_is(x: Tensor) -> Tensor:
    """Return ``x``: the layout that `torch.randn` gives."""
    return x


def from_transposed(x: Tensor) -> Tensor:
    """Return the values of ``x`` in memory that runs through heads before tokens."""
    return x.transpose(1, -2).contiguous().transpose(1, -2)


def every_second_channel(x: Tensor) -> Tensor:
    """Return the values of ``x`` with NaN between channels."""
    wide = torch.full((*x.shape, 2), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def behind_an_odd_offset(x: Tensor) -> Tensor:
    """Return the values of ``x`` inside a guard band of NaN, one element off any alignment; heads are a row apart."""
    padded = torch.full((3 + x.numel() + x.numel() // x.shape[-1],), torch.nan, dtype=x.dtype, device=x.device)
    rows = padded[1 : 1 + x.numel() + x.numel() // x.shape[-1]].view(*x.shape[:-1], x.shape[-1] + 1)[..., :-1]
    return rows.copy_(x)


def one_batch_expanded(x: Tensor) -> Tensor:
    """Return the first batch row of ``x`` for every batch row, stride 0."""
    return x[:1].expand(x.shape)


def one_number_expanded(x: Tensor) -> Tensor:
    """Return the first entry of ``x`` everywhere, all strides 0."""
    return x.flatten()[0].expand(x.shape)


LAYOUTS = (from_transposed, every_second_channel, behind_an_odd_offset, one_batch_expanded)


def leaves_in(case: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Case:
    """Return leaves of the same values and strides, in ``dtype`` (None: their own)."""
    return {
        name: (value.detach() if dtype in (None, value.dtype) else value.detach().to(dtype)).requires_grad_(
            name not in NO_GRADIENT
        )
        for name, value in case.items()
    }


def results_and_gradients(
    kind: str, case: Case, direction: str, incoming: Results, **options: Any
) -> tuple[Results, dict[str, Tensor | None]]:
    """Return results by name, and gradients by the name of their leaf."""
    results = run(kind, case, direction, **options)
    return results, gradients(results, {name: x.to(results[name].dtype) for name, x in incoming.items()}, case)


def assert_triton_agrees(
    kind: str,
    case: Case,
    direction: str,
    *,
    layout: Strided = as_is,
    silent: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Compare every result and gradient with torch in fp64 on the values that the case has in its own dtypes.

    Each may be off by eight times the worst relative error that torch makes in the case's dtypes, taken for four units
    in the last place of fp32 where it is less: the worst entry of one order of the same sums says that much about
    another. Where autograd finds no path, zero is right too.

    Args:
        kind, case, direction, options: as in `run`.
        layout: gives the incoming gradients their strides.
        silent: results that no gradient comes from.
    """
    options = {"precision": "ieee", **options}
    results = run(kind, leaves_in(case), direction, impl="torch", **options)
    assert set(silent) <= set(results)
    incoming = {name: layout(x) if x.numel() else x for name, x in upstream(results).items() if name not in silent}
    exact, exact_gradients = results_and_gradients(
        kind, leaves_in(case, torch.float64), direction, incoming, impl="torch", **options
    )
    rounded, rounded_gradients = results_and_gradients(
        kind, leaves_in(case), direction, incoming, impl="torch", **options
    )
    found, found_gradients = results_and_gradients(kind, leaves_in(case), direction, incoming, impl="triton", **options)
    reached = {name: x for name, x in exact_gradients.items() if x is not None}
    errors = [error(rounded[name], exact[name]) for name in exact]
    errors += [error(rounded_gradients[name], x) for name, x in reached.items()]
    tolerance = 8.0 * max(4 * torch.finfo(torch.float32).eps, *errors)
    assert_all_close(found, exact, tolerance)
    assert_all_close({name: found_gradients[name] for name in reached}, reached, tolerance)
    for name, value in found.items():
        assert value.dtype == rounded[name].dtype, name
    for name, value in found_gradients.items():
        assert value is None or value.dtype == case[name].dtype, name
        if name not in reached and value is not None and value.numel():
            assert_zero(value, name)
