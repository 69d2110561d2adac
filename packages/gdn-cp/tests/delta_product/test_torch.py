"""Gloo ranks with the torch backend against the plain recurrence, differentiated by autograd, on one device."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from delta_product_shares import Share, by_hand
from ranks import run_ranks

from gdn_cp import CPContext, TokenPartition, count_exchanges
from gdn_cp.chunkwise import CPSavedContext
from gdn_cp.cost_model import Link
from gdn_cp.delta_product.common import gdp_chunkwise_context_parallel
from gdn_cp.delta_product.torch import TorchGatedDeltaProductCPBackend
from gdn_kernels.reference.delta_product import delta_product_reference

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
H, G, K, V = 2, 2, 4, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """``lengths`` of packed sequences, or None for two batch rows; ``counts`` of tokens per rank."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...] | None = None
    steps: int = 2
    gated: bool = True
    states: bool = True
    loss_rank: int | None = None  # None: all

    @property
    def cu(self):
        return None if self.lengths is None else (0, *itertools.accumulate(self.lengths))

    def leaves(self):
        generator, hv = torch.Generator().manual_seed(3), H * G
        b, t, r = (2 if self.lengths is None else 1), sum(self.counts), self.steps
        n = b if self.lengths is None else len(self.lengths)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        found = {"q": normal(b, t, H, K), "k": torch.nn.functional.normalize(normal(b, t * r, H, K), dim=-1)}
        found |= {"v": normal(b, t * r, hv, V), "beta": 2 * torch.sigmoid(normal(b, t * r, hv))}
        if self.gated:
            found["g"] = -0.3 * normal(b, t, hv).abs()
        if self.states:
            found["initial_state"] = normal(n, hv, K, V)
        return found

    def weights(self):
        generator = torch.Generator().manual_seed(4)
        b, t = (2 if self.lengths is None else 1), sum(self.counts)
        n = b if self.lengths is None else len(self.lengths)
        wo, wf = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((b, t, H * G, V), (n, H * G, K, V))
        )
        if self.loss_rank is not None:
            span, everywhere = TokenPartition(self.counts).span(self.loss_rank), torch.arange(t)
            wo *= ((everywhere >= span.start) & (everywhere < span.stop))[:, None, None]
        for sequence, length in enumerate(self.lengths or ()):
            wf[sequence] *= length > 0  # a sequence without tokens has no fragment, and so no final state
        return wo, wf

    def whole(self):
        leaves = {name: x.requires_grad_() for name, x in self.leaves().items()}
        options = dict(num_householder=self.steps, scale=0.7, output_final_state=True, cu_seqlens=self.cu)
        o, final = delta_product_reference(**{"g": None, **leaves}, **options)
        wo, wf = self.weights()
        loss = (o * wo).sum() + ((final * wf).sum() if self.states else 0.0)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return o.detach(), final.detach(), dict(zip(leaves, grads, strict=True))

    def on_rank(self, rank, context, changes=None):
        leaves, loss, o, finals = self.forward_on(rank, context, changes)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return o.detach(), finals, dict(zip(leaves, grads, strict=True))

    def forward_on(self, rank, context, changes=None):
        partition = TokenPartition(self.counts)
        leaves = {**self.leaves(), **(changes or {})}
        for name, x in leaves.items():
            if name != "initial_state":
                r = self.steps if name in ("k", "v", "beta") else 1
                leaves[name] = x[:, partition.span(rank).start * r : partition.span(rank).stop * r]
        leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        metadata = None if self.cu is None else partition.packed(self.cu, rank, "cpu")
        g, initial = leaves.get("g"), leaves.get("initial_state")
        o, final = gdp_chunkwise_context_parallel(
            leaves["q"], leaves["k"], leaves["v"], g, leaves["beta"], None, self.steps, 0.7, None,
            TorchGatedDeltaProductCPBackend(), context=context, metadata=metadata, initial_state=initial,
            output_final_state=True,
        )  # fmt: skip
        wo, wf = self.weights()
        loss = (o * partition.split(wo, rank, 1)).sum()
        held = self.final_rows(rank)
        if self.states:
            for row, sequence in held:
                loss = loss + (final[row] * wf[sequence]).sum()
        return leaves, loss, o, {sequence: final[row].detach() for row, sequence in held}

    def final_rows(self, rank):
        """(row of the final state, sequence) of the sequences that end on the rank."""
        if self.lengths is None:
            return [(0, 0), (1, 1)] if rank == len(self.counts) - 1 else []
        metadata = TokenPartition(self.counts).packed(self.cu, rank, "cpu")
        held = list(enumerate(metadata.fragment_sequences))
        return held[:-1] if metadata.following_rank_stop > rank + 1 else held


def close(found, expected, name):
    assert found.shape == expected.shape, name
    if found.numel():
        error = (found - expected).abs().max() / expected.abs().max().clamp_min(1.0)
        assert float(error) <= 1e-10, f"{name}: {float(error):.2e}"


def check(case, ranks):
    o, final, grads = case.whole()
    partition = TokenPartition(case.counts)
    for rank, (found, finals, own) in enumerate(ranks):
        close(found, partition.split(o, rank, 1), f"output of rank {rank}")
        for sequence, state in finals.items():
            close(state, final[sequence], f"final state {sequence}")
        for name, x in own.items():
            if name != "initial_state":
                r = case.steps if name in ("k", "v", "beta") else 1
                span = partition.span(rank)
                close(x, grads[name][:, span.start * r : span.stop * r], f"d{name} of rank {rank}")
    if case.states:
        sequences = set(range(len(case.lengths or (0, 0)))) - {i for i, n in enumerate(case.lengths or ()) if n == 0}
        assert {s for _, finals, _ in ranks for s in finals} == sequences
        close(sum(own["initial_state"] for *_, own in ranks), grads["initial_state"], "dinitial_state")


CASES = {
    2: [Case((5, 4)), Case((0, 7), steps=1), Case((7, 0), gated=False), Case((6, 70), (6, 40, 30), steps=3),
        Case((4, 5), (2, 0, 5, 1, 1)), Case((3, 4), (7,), states=False)],
    3: [Case((3, 1, 3)), Case((0, 4, 3)), Case((4, 0, 5), (9,)), Case((4, 0, 5), (3, 6), gated=False),
        Case((30, 65, 33), (1, 97, 30), steps=1), Case((3, 3, 0), (2, 3, 1)),
        Case((190, 0, 387), (63, 64, 65, 0, 128, 257), steps=1)],
    4: [Case((2, 3, 1, 2), steps=3), Case((4, 4, 4, 4), (5, 4, 7)), Case((1, 0, 0, 6), (1, 1, 5)),
        Case((0, 3, 0, 2), (5,))],
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_equal_one_device_in_fp64_on_every_schedule(size):
    runs = [(case, schedule) for schedule in ("all_gather", "chain", "doubling") for case in CASES[size]]

    def worker(rank):
        context = CPContext(dist.group.WORLD, validate="always")
        return [case.on_rank(rank, context.replace(schedule=schedule)) for case, schedule in runs]

    for (case, _), ranks in zip(runs, zip(*run_ranks(size, worker), strict=True), strict=True):
        check(case, ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["chain", "doubling"])
def test_what_other_schedules_send(schedule):
    """A chain sends one state to the next rank and nothing back; doubling a map over 1, then over 2 ranks."""
    case, state, square = Case((2, 2, 2)), 8 * 2 * H * G * K * V, 8 * 2 * H * G * K * K
    link = Link("one block", 1e6, 1.0)

    def worker(rank):
        context = CPContext(dist.group.WORLD, schedule=schedule, link=link)
        with count_exchanges() as seen:
            case.on_rank(rank, context)
        assert seen.total == 2
        ahead = [2 - rank, rank]  # ranks after this one in each pass
        if schedule == "chain":
            assert seen.sent == [state * (n > 0) for n in ahead]
        else:
            assert seen.sent == [(state + square) * min(n, 2) for n in ahead]

    run_ranks(3, worker)


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["chain", "doubling"])
def test_a_nan_stays_in_its_sequence(schedule):
    """The first sequence of three holds a NaN; the others cross ranks, one of which is empty."""
    case = Case((3, 3, 0, 4), (4, 3, 3), states=False)

    def worker(rank):
        context, q, v = CPContext(dist.group.WORLD, schedule=schedule), case.leaves()["q"], case.leaves()["v"]
        v[:, :2] = torch.nan
        return case.on_rank(rank, context), case.on_rank(rank, context, {"q": q, "v": v})

    for rank, (one, other) in enumerate(run_ranks(4, worker)):
        span = TokenPartition(case.counts).span(rank)
        keep = torch.arange(span.start, span.stop) >= 4
        assert torch.equal(one[0][:, keep], other[0][:, keep])
        for name in one[2]:
            mask = keep.repeat_interleave(2) if name in ("k", "v", "beta") else keep
            assert torch.equal(one[2][name][:, mask], other[2][name][:, mask]), name


@pytest.mark.ranks
@pytest.mark.parametrize("loss_rank", [0, 2])
def test_a_loss_on_one_rank_reaches_the_tokens_before_it_and_no_others(loss_rank):
    case = Case((3, 2, 4), (1, 8), states=False, loss_rank=loss_rank)
    found = run_ranks(3, lambda rank: case.on_rank(rank, CPContext(dist.group.WORLD)))
    check(case, found)
    reached = [any(bool(x.any()) for x in own.values()) for *_, own in found]
    assert reached == [rank <= loss_rank for rank in range(3)]


@pytest.mark.ranks
def test_two_microbatches_in_flight_keep_apart():
    """Forward of both, then backward of both in the same order, with other sequences in each."""
    cases = [Case((4, 5), (6, 3)), Case((4, 5), (2, 5, 2), steps=1)]

    def worker(rank):
        context = CPContext(dist.group.WORLD)
        ahead = [case.forward_on(rank, context) for case in cases]
        return [
            (o.detach(), finals, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)))
            for leaves, loss, o, finals in ahead
        ]

    for case, ranks in zip(cases, zip(*run_ranks(2, worker), strict=True), strict=True):
        check(case, ranks)


@pytest.mark.ranks
def test_one_exchange_per_pass_and_none_when_nothing_crosses():
    def worker(rank):
        context = CPContext(dist.group.WORLD)
        for case, total in ((Case((4, 4), (3, 5)), 2), (Case((4, 4), (4, 0, 1, 3)), 0), (Case((4, 4)), 2)):
            with count_exchanges() as seen:
                case.on_rank(rank, context)
            assert seen.total == total
            batch = 1 if case.cu else 2
            assert seen.sent == [8 * batch * H * G * K * (V + K)] * total

    run_ranks(2, worker)


@pytest.mark.ranks
def test_samples_are_isolated_exactly():
    """FC-D: another sequence's values change nothing of the others, to the last bit."""
    case = Case((4, 4, 4), (3, 6, 3), states=False)

    def worker(rank):
        context = CPContext(dist.group.WORLD)
        q, v = case.leaves()["q"], case.leaves()["v"]
        q[:, 3:9] *= 3.0
        v[:, 6:18] -= 1.0
        return case.on_rank(rank, context), case.on_rank(rank, context, {"q": q, "v": v})

    for rank, (one, other) in enumerate(run_ranks(3, worker)):
        keep = torch.tensor([t < 3 or t >= 9 for t in range(rank * 4, rank * 4 + 4)])
        assert torch.equal(one[0][:, keep], other[0][:, keep])
        for name in one[2]:
            mask = keep.repeat_interleave(2) if name in ("k", "v", "beta") else keep
            assert torch.equal(one[2][name][:, mask], other[2][name][:, mask]), name
        if not keep.all():
            assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("lengths", [None, (4, 3, 6)], ids=["rows", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit_of_either_pass(dtype, lengths):
    share, backend = Share((5, 0, 8), lengths), TorchGatedDeltaProductCPBackend()
    expected = by_hand(share, backend, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = by_hand(share, backend, dtype)
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x), name


def test_a_foreign_saved_context_is_refused():
    with pytest.raises(TypeError, match="saved_context must come from this backend, got metadata str"):
        TorchGatedDeltaProductCPBackend().cp_backward_prepare(torch.zeros(1), CPSavedContext((), "other"))
