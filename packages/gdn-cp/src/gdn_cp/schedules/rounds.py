"""Rounds of communication: what a schedule asks for, and two ways to grant it.

A schedule is a generator: it yields a `Gather` or a `Swap`, is sent the tensors that arrive, and returns its result.
All ranks yield the same number of rounds; a swap in which a rank has nothing to do is empty, and costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gdn_cp import collectives
from gdn_cp.context import CPContext

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Gather:
    """Send ``buffer [n]`` to all ranks; arrives as ``[P, n]``, in rank order."""

    buffer: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Swap:
    """Send flat tensors to ranks; receive flat tensors, as a list in the order of ``receives``.

    Attributes:
        sends: (rank, tensor), at most one per rank.
        receives: (rank, number of elements), at most one per rank.
        like: a tensor of the dtype and device of all of them.
    """

    sends: tuple[tuple[int, Tensor], ...]
    receives: tuple[tuple[int, int], ...]
    like: Tensor


Steps = Generator[Gather | Swap, Any, T]


def over_ranks(steps: Steps[T], context: CPContext, label: str, meanwhile: Callable[[], None] | None = None) -> T:
    """Run one rank's schedule over its process group, as one exchange of this label.

    ``meanwhile`` is called while the first round travels, on every rank.
    """
    answer: Any = None
    opened = False
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as done:
            if meanwhile is not None:
                meanwhile()
            result: T = done.value
            return result
        if isinstance(step, Gather):
            answer = collectives.all_gather(step.buffer, context, label, meanwhile)
        elif step.sends or step.receives:
            answer = collectives.swap(
                step.sends, step.receives, step.like, context, label, continued=opened, meanwhile=meanwhile
            )
            opened = True
        else:
            answer = []
            continue
        meanwhile = None


def in_lockstep(schedules: Sequence[Steps[T]]) -> list[T]:
    """Run the schedules of all ranks in one process, round by round; one result per rank."""
    answers: list[Any] = [None] * len(schedules)
    while True:
        steps: list[Gather | Swap] = []
        results: list[T] = []
        for schedule, answer in zip(schedules, answers, strict=True):
            try:
                steps.append(schedule.send(answer))
            except StopIteration as done:
                results.append(done.value)
        if len(results) == len(schedules):
            return results
        assert not results, "all ranks of a schedule take the same number of rounds"
        answers = _deliver(steps)


def _deliver(steps: list[Gather | Swap]) -> list[Any]:
    gathers = [step.buffer for step in steps if isinstance(step, Gather)]
    if gathers:
        assert len(gathers) == len(steps), "all ranks of a schedule gather, or none"
        return [torch.stack(gathers)] * len(steps)
    swaps = [step for step in steps if isinstance(step, Swap)]
    mail = {(source, target): x for source, swap in enumerate(swaps) for target, x in swap.sends}
    received = [[mail.pop((source, rank)) for source, _ in swap.receives] for rank, swap in enumerate(swaps)]
    assert not mail, f"messages that no rank takes: {sorted(mail)}"
    for swap, tensors in zip(swaps, received, strict=True):
        assert [size for _, size in swap.receives] == [x.numel() for x in tensors], "both sides know a message's size"
    return received
