"""The pass behind the fused functions, all ranks in one process: partitions, rank order, gradcheck, what is kept."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from published import Case, named, simulate, stack
from torch import Tensor

from gdn_cp.fused_pass import FusedCall, fused_plan, mask_idle_frames, run_fused
from gdn_kernels.frame_gdn import stages
from gdn_kernels.frame_gdn.op import frame_gdn_arguments

CUTS = ((2, 1, 2), (0, 3), (3, 0, 1), (1, 1, 0))
CASES = [
    *(Case(counts, camera=camera, reverse=reverse)
      for counts, camera, reverse in itertools.product(CUTS, (False, True), (False, True))),
    *(Case(counts, camera=camera, truncate=sum(counts)) for counts in ((2, 0, 1), (1, 2)) for camera in (False, True)),
    Case((2, 1), truncate=3, unused=("num", "den")), Case((2, 1), truncate=3, unused=("terminal_state_kv",)),
]  # fmt: skip


@pytest.mark.parametrize("save_transitions", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_in_one_process_equal_the_transcription(case, save_transitions):
    """Uneven and empty ranks, both rank orders; the final state's gradients are summed over ranks."""
    ranks = [{n: case.cut(n, x, rank).clone() for n, x in case.tensors().items()} for rank in range(len(case.counts))]
    wanted = [{n: x.requires_grad_() for n, x in rank.items() if not n.startswith("rope")} for rank in ranks]
    results = [named(case, x) for x in simulate(case, ranks, save_transitions)]
    loss = sum((case.rank_loss(rank, x) for rank, x in enumerate(results)), torch.zeros((), dtype=torch.float64))
    found = iter(torch.autograd.grad(loss, [x for rank in wanted for x in rank.values()]))
    case.compare([(x, {name: next(found) for name in names}) for x, names in zip(results, wanted, strict=True)])


@pytest.mark.parametrize("case", [Case((1, 2, 1)), Case((1, 1), reverse=True, truncate=None, camera=True),
                                  Case((1, 1, 1), truncate=3, weights="")], ids=str)  # fmt: skip
def test_gradcheck_over_three_ranks(case):
    ranks = [{n: case.cut(n, x, rank).clone() for n, x in case.tensors().items()} for rank in range(len(case.counts))]
    names = [(rank, n) for rank, x in enumerate(ranks) for n in x if not n.startswith("rope")]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = [dict(x) for x in ranks]
        for (rank, n), x in zip(names, tensors, strict=True):
            given[rank][n] = x
        return tuple(x for result in simulate(case, given) for x in result if x is not None)

    leaves = [ranks[rank][n].requires_grad_() for rank, n in names]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("recompute", [True, False])
def test_recompute_decides_what_reaches_the_backward(monkeypatch, recompute):
    """A stage's kept tensors are saved for the adjoint, or dropped."""
    kept, seen = torch.ones(3), []
    begin, adjoint = stages.begin, stages.adjoint

    class Keeping:
        def __init__(self, *arguments: Any) -> None:
            self.run = begin(*arguments)
            self.summary = self.run.summary

        def finish(self, entry: Any) -> Any:
            return (*self.run.finish(entry)[:2], (kept, None))

    def spying(*arguments: Any) -> Any:
        seen.append(list(arguments[5]))
        return adjoint(*arguments[:5])

    monkeypatch.setattr(stages, "begin", Keeping)
    monkeypatch.setattr(stages, "adjoint", spying)
    case = Case((2,))
    x = {n: y if n.startswith("rope") else y.requires_grad_() for n, y in case.tensors().items()}
    inputs, options, _ = frame_gdn_arguments(
        x["qkv"], x["beta"], x["decay"], None, None, None, 0.6, "forward", None, None, None, False, 1e-5, 0.0, None,
        "torch", divide=False,
    )  # fmt: skip
    plan = fused_plan(inputs, options, (0, 1), reverse=False, has_final=False, save_transitions=True)
    result = run_fused([FusedCall(plan, inputs, options, recompute)], stack, torch.empty(0))[0]
    result.numerator.sum().backward()
    assert len(seen) == 1
    assert [y is None or torch.equal(y, kept) for y in seen[0]] == ([] if recompute else [True, True])


def test_idle_frames_forget_nothing_and_write_nothing():
    beta, decay = torch.rand(2, 2, 4, 3, requires_grad=True), torch.rand(2, 2, 4, requires_grad=True)
    masked, kept = mask_idle_frames(beta, decay, 1)
    assert torch.equal(masked[:, :, :1], beta[:, :, :1])
    assert torch.equal(kept[:, :, :1], decay[:, :, :1])
    assert not masked[:, :, 1:].any()
    assert bool((kept[:, :, 1:] == 1).all())
    (masked.sum() + kept.sum()).backward()
    assert not beta.grad[:, :, 1:].any()
    assert not decay.grad[:, :, 1:].any()
    assert mask_idle_frames(beta, decay, 4) == (beta, decay)
