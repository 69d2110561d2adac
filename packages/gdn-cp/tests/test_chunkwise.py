"""The drivers with a scalar recurrence s_t = a_t s_{t-1} + x_t, out_t = s_t, as backend."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from gdn_cp import CPContext, collectives, count_exchanges
from gdn_cp.chunkwise import (
    CPBackwardPackedSummary,
    CPBackwardUnpackedSummary,
    CPForwardPackedSummary,
    CPForwardUnpackedSummary,
    CPSavedContext,
    chunkwise_cp_backward,
    chunkwise_cp_forward,
)

COUNTS = (3, 0, 4)


@dataclasses.dataclass
class Scalar:
    """The backend; ``packed`` chooses the form of its summaries."""

    packed: bool = True
    calls: list[Any] = dataclasses.field(default_factory=list)

    def summary(self, kinds, transition, increment):
        pair = torch.stack([increment, transition])[None]
        return kinds[0](pair) if self.packed else kinds[1](transition.view(1, 1).clone(), increment.view(1, 1).clone())

    def maps(self, summary):
        assert type(summary).__name__.endswith("PackedSummary") or not self.packed
        if self.packed:
            return [(float(m), float(b)) for ((b, m),) in summary.packed]
        return [(float(m), float(b)) for m, b in zip(*vars(summary).values(), strict=True)]

    def cp_forward_prepare(self, inputs):
        self.calls.append("forward_prepare")
        state, transition = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        for a, x in zip(*inputs, strict=True):
            state, transition = a * state + x, a * transition
        return self.summary((CPForwardPackedSummary, CPForwardUnpackedSummary), transition, state), inputs

    def cp_forward_apply(self, local_context, preceding_summaries):
        self.calls.append(("forward_apply", len(self.maps(preceding_summaries))))
        state = 0.0
        for m, b in self.maps(preceding_summaries):
            state = m * state + b
        before, out = [], []
        for a, x in zip(*local_context, strict=True):
            before.append(state)
            state = float(a * state + x)
            out.append(state)
        return torch.tensor(out, dtype=torch.float64), CPSavedContext((local_context[0],), tuple(before))

    def cp_backward_prepare(self, output_grad, saved_context):
        self.calls.append("backward_prepare")
        (a,) = saved_context.tensors
        adjoint, transition = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        for i in reversed(range(len(a))):
            adjoint, transition = a[i] * (adjoint + output_grad[i]), a[i] * transition
        kinds = (CPBackwardPackedSummary, CPBackwardUnpackedSummary)
        return self.summary(kinds, transition, adjoint), (output_grad, saved_context)

    def cp_backward_apply(self, backward_context, following_summaries):
        self.calls.append(("backward_apply", len(self.maps(following_summaries))))
        output_grad, saved = backward_context
        adjoint, da, dx = 0.0, [], []
        for m, gamma in reversed(self.maps(following_summaries)):
            adjoint = m * adjoint + gamma
        for i in reversed(range(len(saved.metadata))):
            adjoint = float(adjoint + output_grad[i])
            da.append(adjoint * saved.metadata[i])
            dx.append(adjoint)
            adjoint = float(saved.tensors[0][i] * adjoint)
        return torch.tensor(da[::-1], dtype=torch.float64), torch.tensor(dx[::-1], dtype=torch.float64)


def whole():
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(sum(COUNTS), generator=generator, dtype=torch.float64) for _ in range(3)]


def run(rank, backend, context, **options):
    a, x, dout = (t.split(COUNTS)[rank] for t in whole())
    forward = chunkwise_cp_forward(backend, (a, x), None, slice(0, rank), context=context, **options)
    later = slice(rank + 1, len(COUNTS))
    found = chunkwise_cp_backward(backend, dout, forward.saved_context, None, later, context=context, **options)
    return forward.output, *found


def expected():
    a, x, dout = whole()
    a.requires_grad_()
    x.requires_grad_()
    state, out = torch.zeros((), dtype=torch.float64), []
    for i in range(len(a)):
        state = a[i] * state + x[i]
        out.append(state)
    output = torch.stack(out)
    return output.detach(), *torch.autograd.grad(output, (a, x), dout)


@pytest.mark.ranks
@pytest.mark.parametrize("packed", [True, False])
def test_ranks_equal_one_device_with_one_exchange_per_pass(packed):
    def worker(rank: int):
        backend, context = Scalar(packed), CPContext(dist.group.WORLD)
        with count_exchanges() as seen:
            found = run(rank, backend, context)
        assert seen.labels == ["chunkwise_cp forward", "chunkwise_cp backward"]
        assert seen.sent == [16, 16]
        calls = ["forward_prepare", ("forward_apply", rank), "backward_prepare", ("backward_apply", 2 - rank)]
        assert backend.calls == calls
        return found

    found = [torch.cat(parts) for parts in zip(*run_ranks(3, worker), strict=True)]
    for one, other in zip(found, expected(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("schedule", ["chain", "doubling"])
def test_other_schedules_hand_over_one_summary(packed, schedule):
    def worker(rank: int):
        backend, context = Scalar(packed), CPContext(dist.group.WORLD, schedule=schedule)
        found = run(rank, backend, context, carries=True)
        assert backend.calls[1::2] == [("forward_apply", min(rank, 1)), ("backward_apply", min(2 - rank, 1))]
        return found

    found = [torch.cat(parts) for parts in zip(*run_ranks(3, worker), strict=True)]
    for one, other in zip(found, expected(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("summary", "carries", "text"),
    [
        (CPForwardPackedSummary(torch.zeros(2, 5)), None, "schedule='chain' needs carries"),
        (CPForwardPackedSummary(torch.zeros(2)), True, r"needs summaries with a square transition .* got \[2\]"),
        (CPForwardPackedSummary(torch.zeros(3, 2)), True, r"needs summaries with a square transition .* got \[3, 2\]"),
        (
            CPForwardUnpackedSummary(torch.zeros(2, 3), torch.zeros(2, 4)),
            True,
            r"needs summaries with a square transition .* got \[2, 3\] and \[2, 4\]",
        ),
    ],
)
def test_other_schedules_need_maps_and_to_know_what_goes_on(summary, carries, text):
    backend, context = Scalar(), CPContext.single().replace(schedule="chain")
    object.__setattr__(context, "size", 2)
    backend.cp_forward_prepare = lambda inputs: (summary, None)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=text):
        chunkwise_cp_forward(backend, None, None, slice(0), carries=carries, context=context)


@pytest.mark.ranks
def test_without_exchange_nothing_is_sent_and_apply_gets_no_summary():
    def worker(rank: int) -> None:
        backend = Scalar()
        with count_exchanges() as seen:
            run(rank, backend, CPContext(dist.group.WORLD), exchange=False)
        assert seen.total == 0
        assert backend.calls[1::2] == [("forward_apply", 0), ("backward_apply", 0)]

    run_ranks(3, worker)


@pytest.mark.ranks
def test_a_summary_that_nobody_reads_is_nan_when_everything_is_validated():
    def worker(rank: int) -> None:
        for validate, expect in (("always", True), ("first", False)):
            backend, context = Scalar(), CPContext(dist.group.WORLD, validate=validate)
            a, x, _ = (t.split(COUNTS)[rank] for t in whole())
            result = chunkwise_cp_forward(backend, (a, x), None, slice(0, 3), needed=rank != 2, context=context)
            assert bool(result.output.isnan().any()) == (expect and rank != 1)

    run_ranks(3, worker)


def test_a_packed_summary_is_gathered_without_a_copy(monkeypatch):
    sent = []

    def gather(buffer, context, label):
        sent.append(buffer.data_ptr())
        return buffer.expand(2, -1)

    monkeypatch.setattr(collectives, "all_gather", gather)
    context = CPContext.single()
    object.__setattr__(context, "size", 2)
    backend, kept = Scalar(), []
    prepare = backend.cp_forward_prepare
    backend.cp_forward_prepare = lambda inputs: kept.append(prepare(inputs)) or kept[-1]  # type: ignore[method-assign]
    chunkwise_cp_forward(backend, (torch.rand(3), torch.rand(3)), None, slice(0, 1), context=context)
    assert sent == [kept[0][0].packed.data_ptr()]


@pytest.mark.parametrize(
    "summary, kind, text",
    [
        (
            CPForwardPackedSummary(torch.zeros(2, dtype=torch.bfloat16)),
            ValueError,
            "dtype float32, float64, got bfloat16",
        ),
        (CPForwardPackedSummary(torch.zeros(2, 3).mT), ValueError, "must be contiguous, got strides"),
        (
            CPForwardUnpackedSummary(torch.zeros(2, device="meta"), torch.zeros(2)),
            ValueError,
            "on one device, in one dtype, got cpu and meta",
        ),
        (
            CPBackwardPackedSummary(torch.zeros(2)),
            TypeError,
            "must return a CPForwardPackedSummary or CPForwardUnpacked",
        ),
    ],
)
def test_other_summaries_are_refused(summary, kind, text):
    backend = Scalar()
    backend.cp_forward_prepare = lambda inputs: (summary, None)  # type: ignore[method-assign]
    with pytest.raises(kind, match=text):
        chunkwise_cp_forward(backend, None, None, slice(0), context=CPContext.single())
