"""How far a result may be from the exact one: measured on the token-by-token loop in the low precision, times two.

Where the loop happens to be luckier than four units in the last place, four are taken for its error: below that, the
worst entry of one order of summation says little about another order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from agreement import error
from frame_gdn_cases import NO_GRADIENT, Case, Results, gradients, leaves, run_sequential
from torch import Tensor


class Exact(NamedTuple):
    """Results and gradients in fp64 of the values a case has in its own dtypes, and the error that fp32 makes."""

    results: Results
    gradients: dict[str, Tensor | None]
    fp32_error: float


def exact(kind: str, case: Case, direction: str, incoming: Results, **options: object) -> Exact:
    """Run the loop in fp64 and in fp32; the error is the worst relative one of any result or gradient, times two."""
    found = []
    for dtype in (torch.float64, torch.float32):
        copy = leaves({name: value.to(dtype) for name, value in case.items()})
        results = run_sequential(kind, copy, direction, **options)
        grads = gradients(results, {name: value.to(dtype) for name, value in incoming.items()}, copy)
        found.append((results, grads))
    (results, grads), (results_32, grads_32) = found
    errors = [error(results_32[name], value) for name, value in results.items()]
    errors += [error(grads_32[name], value) for name, value in grads.items() if value is not None]
    assert all(name not in grads for name in NO_GRADIENT)
    return Exact(results, grads, 2.0 * max(*errors, 4 * torch.finfo(torch.float32).eps))


def half_ulp(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding a value to ``dtype``."""
    return torch.finfo(dtype).eps / 2
