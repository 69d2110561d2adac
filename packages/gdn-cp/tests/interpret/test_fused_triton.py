"""The pass behind the published fused functions on Triton, kernels in the interpreter, against the transcription."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from published import Case, named, simulate

pytestmark = pytest.mark.interpret
if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1 in the environment", allow_module_level=True)

# A few hundred sums of products over D, S and F in another order, and inputs rounded to fp32 once.
TOLERANCE = 256 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    "case", [Case((1, 2), reverse=True), Case((1, 2), truncate=3), Case((2, 1), camera=True)], ids=str
)
def test_ranks_in_one_process_equal_the_transcription(case):
    """Both rank orders and a final state; the fold of ranks is the kernel's."""
    ranks = [
        {n: case.cut(n, x, rank).float().clone() for n, x in case.tensors().items()} for rank in range(len(case.counts))
    ]
    wanted = [{n: x.requires_grad_() for n, x in rank.items() if not n.startswith("rope")} for rank in ranks]
    results = [named(case, x) for x in simulate(case, ranks, impl="triton")]
    loss = sum((case.rank_loss(rank, x) for rank, x in enumerate(results)), torch.zeros((), dtype=torch.float64))
    found = iter(torch.autograd.grad(loss, [x for rank in wanted for x in rank.values()]))
    case.compare(
        [(x, {name: next(found) for name in names}) for x, names in zip(results, wanted, strict=True)], TOLERANCE
    )
