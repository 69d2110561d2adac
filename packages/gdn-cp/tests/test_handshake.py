"""Disagreement or failure of one rank is the right error on all of them, within seconds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clips import Clip, shard_arguments, shard_leaves
from ranks import run_ranks
from torch import Tensor

from gdn_cp import (
    CPContext,
    FramePartition,
    collectives,
    count_exchanges,
    cp_frame_gdn,
    cp_frame_gdn_scan,
    cp_fused_gdn_chunkwise_raw_autograd,
    cp_halo_exchange,
    halo_exchange,
)
from gdn_cp.delta_product import TorchGatedDeltaProductCPBackend, gdp_chunkwise_context_parallel
from gdn_cp.handshake import DESCRIPTOR_BYTES, Terms, agree, digest

pytestmark = pytest.mark.ranks
PARTITION = FramePartition((3, 0, 4))


def call(rank: int, context: CPContext, changes: dict[str, Any], partition: FramePartition | None = PARTITION):
    clip = Clip()
    arguments = shard_arguments(clip, PARTITION, rank, shard_leaves(clip, PARTITION, rank))
    return cp_frame_gdn(context=context, **{"partition": partition, **arguments, **changes})


def errors_of(worker) -> list[tuple[str, str]]:
    """Run on three ranks and return class and message of what each raised, all within five seconds."""

    def caught(rank: int) -> tuple[str, str, float]:
        begin = time.monotonic()
        try:
            worker(rank)
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - begin
        return "nothing", "", 0.0

    found = run_ranks(3, caught)
    assert max(seconds for *_, seconds in found) < 5.0
    return [(kind, message) for kind, message, _ in found]


DISAGREEMENTS = {
    "k_scale": {"k_scale": 0.5},
    "direction": {"direction": "forward"},
    "initial state": {"initial_state": None},
    "final state": {"output_final_state": False},
    "eps": {"eps": 0.25},
    "norm_eps": {"norm_eps": 0.5},
    "chunk_starts": {"chunk_starts": (0, 3)},
    "rope": {"rope": None},
    "q_norm_weight": {"q_norm_weight": None},
    "k_norm_weight": {"k_norm_weight": None},
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_flag_that_differs_on_one_rank_is_named_on_all(name):
    """FC-D05."""
    found = errors_of(lambda rank: call(rank, CPContext(dist.group.WORLD), DISAGREEMENTS[name] if rank == 2 else {}))
    for kind, message in found:
        assert kind == "RuntimeError"
        assert message.startswith(f"cp_frame_gdn: ranks disagree on {name}: rank 0 has ")
        assert "rank 2 has" in message


@pytest.mark.parametrize(("name", "shape"), [("H", (2, 9, 3, 2, 6)), ("D", (2, 9, 3, 4, 8)), ("B", (1, 9, 3, 4, 6))])
def test_a_shape_that_differs_on_one_rank_is_named_on_all(name, shape):
    """FC-D05: payloads of unequal size are never sent."""

    def worker(rank: int) -> None:
        b, n, _, h, d = shape if rank == 0 else (2, PARTITION.counts[rank] * 3, 3, 4, 6)
        frames = PARTITION.counts[rank]
        cp_frame_gdn(torch.rand(b, n, 3, h, d), torch.rand(b, h, frames, 3), torch.rand(b, h, frames),
                     context=CPContext(dist.group.WORLD))  # fmt: skip

    for kind, message in errors_of(worker):
        assert kind == "RuntimeError"
        assert f"ranks disagree on {name}: rank 0 has" in message


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"beta": torch.rand(2, 4, 5, 3)}, "ValueError", "must have"),
        ({"k_scale": "large"}, "TypeError", "k_scale must be a number"),
        ({"impl": "triton"}, "NotImplementedError", 'impl="triton"'),
        ({"k_scale": 10**400}, "OverflowError", "too large"),
        ({"partition": 3}, "TypeError", "partition must be a FramePartition or None, got int"),
    ],
    ids=["ValueError", "TypeError", "NotImplementedError", "OverflowError", "partition"],
)
def test_a_rank_whose_arguments_fail_fails_all_with_its_class(changes, kind, text):
    found = errors_of(lambda rank: call(rank, CPContext(dist.group.WORLD), changes if rank == 1 else {}))
    for rank, (raised, message) in enumerate(found):
        assert raised == kind
        assert text in message
        assert ("rank 1: " in message) == (rank != 1)


def test_partitions_that_do_not_fit_fail_all():
    found = errors_of(
        lambda rank: call(rank, CPContext(dist.group.WORLD), {}, FramePartition((3, 4)) if rank == 1 else PARTITION)
    )
    assert all(
        kind == "RuntimeError" and "as many ranks as the context, 3, got 2" in message for kind, message in found
    )
    found = errors_of(lambda rank: call(rank, CPContext(dist.group.WORLD), {}, FramePartition((4, 0, 3))))
    assert all(kind == "RuntimeError" and "this rank's part of the partition" in message for kind, message in found)
    found = errors_of(lambda rank: call(rank, CPContext(dist.group.WORLD), {"chunk_starts": (0, 2)}, None))
    assert all(kind == "RuntimeError" and "chunk_starts need a partition" in message for kind, message in found)


def test_no_grad_on_one_rank_fails_all():
    """FC-D07."""

    def worker(rank: int) -> None:
        with torch.set_grad_enabled(rank != 1):
            call(rank, CPContext(dist.group.WORLD), {})

    for kind, message in errors_of(worker):
        assert kind == "RuntimeError"
        assert "ranks disagree on grad mode: rank 0 has True, rank 1 has False" in message


def test_validate_always_finds_a_later_mistake():
    def worker(rank: int) -> None:
        context = CPContext(dist.group.WORLD, validate="always")
        call(rank, context, {})
        call(rank, context, {"norm_eps": 0.5} if rank == 0 else {})

    assert all("ranks disagree on norm_eps" in message for _, message in errors_of(worker))


def test_a_failure_after_the_first_call_is_raised_where_it_is_and_times_out_elsewhere():
    """FC-D05: bounded by the group's timeout, with the operation, tag and rank in the message."""

    def worker(rank: int) -> tuple[str, str]:
        context = CPContext(dist.group.WORLD, tag="blocks.3")
        call(rank, context, {})
        try:
            call(rank, context, {"k_scale": -1.0} if rank == 1 else {})
        except Exception as error:
            time.sleep(0 if rank != 1 else 4)  # a rank that is alive and silent
            return type(error).__name__, str(error)
        return "nothing", ""

    found = run_ranks(3, worker, timeout=2.0)
    assert found[1] == ("ValueError", "k_scale must be a finite number > 0, got -1.0")
    for rank in (0, 2):
        assert found[rank][0] == "RuntimeError"
        where = f"exchange of cp_frame_gdn forward (tag blocks.3) did not complete on rank {rank} of 3"
        assert found[rank][1] == f"gdn_cp: {where}"


@pytest.mark.parametrize("op", ["cp_frame_gdn", "halo_exchange"])
def test_a_rank_that_never_arrives_is_an_error_at_the_timeout(op):
    """FC-D05: on every other rank, with the operation, tag and rank in the message and the cause chained."""

    def worker(rank: int) -> tuple[str, float]:
        context, begin = CPContext(dist.group.WORLD, tag="blocks.3"), time.monotonic()
        if rank == 1:
            time.sleep(4)  # alive and silent
            return "", 0.0
        x, calls = (
            torch.rand(2, PARTITION.counts[rank], 5),
            {
                "cp_frame_gdn": lambda: call(rank, context, {}),
                "halo_exchange": lambda: halo_exchange(x, 1, 0, 1, context, PARTITION),
            },
        )
        with pytest.raises(RuntimeError, match="did not complete") as caught:
            calls[op]()
        assert caught.value.__cause__ is not None
        return str(caught.value), time.monotonic() - begin

    found = run_ranks(3, worker, timeout=1.0)
    for rank in (0, 2):
        assert found[rank][0] == (
            f"gdn_cp: exchange of {op} handshake (tag blocks.3) did not complete on rank {rank} of 3"
        )
        assert found[rank][1] < 3.5


def test_a_class_that_no_rank_could_make_is_a_runtime_error_elsewhere():
    class Odd(Exception):
        pass

    def fail() -> Any:
        raise Odd('\x00"\U0001f600' * 200)

    def worker(rank: int) -> None:
        context = CPContext(dist.group.WORLD, tag='"\x00\U0001f600' * 20)
        agree("op", context, None, fail if rank == 2 else lambda: (Terms((), (), False, True), None))

    found = errors_of(worker)
    assert [kind for kind, _ in found] == ["RuntimeError", "RuntimeError", "Odd"]
    assert all("rank 2: " in message for _, message in found[:2])


def test_long_terms_fit_the_descriptor_and_are_told_apart():
    def worker(rank: int) -> None:
        terms = tuple((f"term {i}", "x" * 100 + str(rank if i == 20 else 0)) for i in range(24))
        agree("op", CPContext(dist.group.WORLD), None, lambda: (Terms(terms, (), False, True), None))

    assert all("op: ranks disagree on term 20: rank 0 has" in message for _, message in errors_of(worker))


def test_descriptors_travel_where_the_group_sends():
    """A rank whose tensors lie where the group sends nothing takes part, to tell the others so."""

    def worker(rank: int) -> bool:
        terms = Terms((), (), rank == 1, True)
        device = (None, torch.device("cuda"), torch.device("cpu"))[rank]
        return agree("op", CPContext(dist.group.WORLD), device, lambda: (terms, None))[1]

    assert run_ranks(3, worker) == [True] * 3


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("validate", {"validate": "always"}, ("first", "always")),
        ("force_backward", {"force_backward": True}, ("False", "True")),
    ],
)
@pytest.mark.parametrize("op", ["cp_frame_gdn", "halo_exchange"])
def test_an_option_of_the_context_that_differs_is_named_on_all(op, name, option, values):
    def worker(rank: int) -> None:
        context = CPContext(dist.group.WORLD, tag="blocks.3", **(option if rank == 1 else {}))
        if op == "cp_frame_gdn":
            call(rank, context, {})
        else:
            halo_exchange(torch.rand(2, PARTITION.counts[rank], 5), 1, 0, 1, context, PARTITION)

    for kind, message in errors_of(worker):
        assert kind == "RuntimeError"
        where = f"rank 0 has {values[0]}, rank 1 has {values[1]}"
        assert message == f"{op} (tag blocks.3): ranks disagree on {name}: {where}"


@pytest.mark.parametrize("op", ["frames", "product"])
def test_a_schedule_that_differs_after_the_first_call_is_named_on_all(op):
    """What is sent depends on it, so another one is another kind of call."""

    def worker(rank: int) -> None:
        context = CPContext(dist.group.WORLD, schedule="all_gather")
        OPS[op](rank, context, True)
        OPS[op](rank, context.replace(schedule="chain" if rank == 1 else "doubling"), True)

    for _, message in errors_of(worker):
        assert "ranks disagree on schedule: rank 0 has doubling, rank 1 has chain" in message


def test_ranks_in_different_operations_are_told_so():
    """They would send buffers of different sizes; terms of two operations have neither number nor names in common."""

    def worker(rank: int) -> None:
        if rank == 1:
            x = torch.rand(2, PARTITION.counts[rank], 5)
            halo_exchange(x, 1, 0, 1, CPContext(dist.group.WORLD, tag="conv"), PARTITION)
        else:
            call(rank, CPContext(dist.group.WORLD), {})

    for rank, (kind, message) in enumerate(errors_of(worker)):
        assert kind == "RuntimeError"
        own = "halo_exchange (tag conv)" if rank == 1 else "cp_frame_gdn"
        runs = "rank 0 runs cp_frame_gdn, rank 1 halo_exchange (tag conv)"
        assert message == f"{own}: ranks disagree on the operation: {runs}"


def frames_of(rank: int, context: CPContext, needs: bool) -> tuple[Tensor, Tensor]:
    arguments = {k: x.detach() if isinstance(x, Tensor) else x for k, x in call_arguments(rank).items()}
    leaf = arguments["beta"].requires_grad_(needs)
    return cp_frame_gdn(context=context, partition=PARTITION, **arguments).output, leaf


def call_arguments(rank: int) -> dict[str, Any]:
    clip = Clip(initial=False, final=False)
    return shard_arguments(clip, PARTITION, rank, shard_leaves(clip, PARTITION, rank))


def halo_of(rank: int, context: CPContext, needs: bool) -> tuple[Tensor, Tensor]:
    leaf = torch.arange(2.0 * PARTITION.counts[rank]).reshape(2, -1).requires_grad_(needs)
    return halo_exchange(leaf, 2, 1, 1, context, PARTITION), leaf


def scan_of(rank: int, context: CPContext, needs: bool) -> tuple[Tensor, Tensor]:
    W = 0.5 * torch.eye(4).expand(2, PARTITION.counts[rank], 4, 4)
    leaf = torch.ones(2, PARTITION.counts[rank], 4, 4).requires_grad_(needs)
    return cp_frame_gdn_scan(W, leaf, W, torch.ones(W.shape[:3]), context)[0], leaf


def product_of(rank: int, context: CPContext, needs: bool) -> tuple[Tensor, Tensor]:
    tokens, generator = PARTITION.counts[rank], torch.Generator().manual_seed(rank)
    q, k, v = torch.rand(3, 1, tokens, 2, 4, generator=generator)
    leaf = v.clone().requires_grad_(needs)
    beta, backend = torch.rand(1, tokens, 2, generator=generator), TorchGatedDeltaProductCPBackend()
    return gdp_chunkwise_context_parallel(q, k, leaf, None, beta, None, 1, 1.0, None, backend, context=context), leaf


OPS = {"frames": frames_of, "halo": halo_of, "scan": scan_of, "product": product_of}
NONE, ALL, FIRST, LAST = (False,) * 3, (True,) * 3, (True, False, False), (False, False, True)
NEEDS = {  # who needs a gradient in call after call, and in which of them all ranks run a backward
    "one, then all": ([FIRST, ALL], [True, True]),
    "all, then one": ([ALL, FIRST], [True, True]),
    "one, then another": ([FIRST, LAST], [True, True]),
    "one, then none": ([FIRST, NONE], [True, True]),
    "all, then none": ([ALL, NONE, ALL], [True, True, True]),
    "none, then all, then none": ([NONE, ALL, NONE, ALL], [False, True, False, True]),
}
OPTIONS = {  # of the context
    "first": {},
    "always": {"validate": "always"},
    "forced": {"force_backward": True},
}


def passes_of(
    op: Callable[[int, CPContext, bool], tuple[Tensor, Tensor]], rank: int, context: CPContext, needs: bool
) -> tuple[list[str], Tensor, Tensor | None]:
    """Run a call, and its backward if it has one; returns the passes that sent, the output, and the leaf's gradient."""
    with count_exchanges() as seen:
        output, leaf = op(rank, context, needs)
        if output.requires_grad:
            output.square().sum().backward()
    return [label.split()[-1] for label in seen.labels], output.detach(), leaf.grad


@pytest.mark.parametrize("op", OPS)
def test_the_need_of_gradients_may_change_from_call_to_call(op):
    """FC-D07: whoever comes to need one or no longer does, all ranks run a backward or none, with the same numbers."""
    cases = [(name, option) for name in NEEDS for option in OPTIONS]

    def worker(rank: int) -> list[Any]:
        expected, found = passes_of(OPS[op], rank, CPContext(dist.group.WORLD), True), []
        for name, option in cases:
            context = CPContext(dist.new_group([0, 1, 2]), **OPTIONS[option])
            for needs in NEEDS[name][0]:
                labels, output, gradient = passes_of(OPS[op], rank, context, needs[rank])
                assert torch.equal(output, expected[1])
                assert (gradient is not None) == needs[rank]
                assert gradient is None or torch.equal(gradient, expected[2])
                found.append(labels)
        return found

    ranks = run_ranks(3, worker, timeout=5.0)
    assert ranks[0] == ranks[1] == ranks[2]
    found = iter(ranks[0])
    for name, option in cases:
        for needs, backward in zip(*NEEDS[name], strict=True):
            has_one = {"first": backward, "always": any(needs), "forced": True}[option]
            assert next(found) == ["forward", "backward"][: 1 + has_one], (name, option, needs)


def test_a_frozen_graph_after_calls_with_gradients_is_told_what_to_do():
    """A compiled graph that needs no gradient has no backward: whether another rank's has, it cannot know."""

    def worker(rank: int) -> str:
        terms = [Terms((), (), needs, True, joins=needs) for needs in (True, False)]
        context = CPContext(dist.group.WORLD)
        assert agree("op", context, None, lambda: (terms[0], None))[1]
        with pytest.raises(RuntimeError) as caught:
            agree("op", context, None, lambda: (terms[1], None))
        quiet = Terms((), (), False, False, joins=False)
        assert not agree("op", context, None, lambda: (quiet, None))[1]
        return str(caught.value)

    for rank, message in enumerate(run_ranks(2, worker)):
        assert message.startswith("op: some rank needed a gradient in the first such call, and the compiled graph of")
        assert f"rank {rank} has no backward" in message
        assert "run what is frozen under torch.no_grad(), or give every rank a context with force_bac" in message


def test_nothing_is_compared_in_a_steady_state(monkeypatch):
    """Comparing waits on the host: once per kind of call, and once more where nobody needed a gradient at first."""
    compared, gather = [], collectives.gather_descriptors
    monkeypatch.setattr(collectives, "gather_descriptors", lambda *given: (compared.append(1), gather(*given))[1])

    def worker(rank: int) -> list[int]:
        found = []
        for op, sequence in itertools.product(OPS.values(), ((NONE, NONE, ALL, ALL, NONE), (FIRST, ALL, NONE, LAST))):
            context = CPContext(dist.new_group([0, 1, 2]))
            for needs in sequence:
                compared.clear()
                passes_of(op, rank, context, needs[rank])
                found.append(len(compared))
        return found

    assert run_ranks(3, worker, timeout=5.0) == [[1, 0, 1, 0, 0, 1, 0, 0, 0] * len(OPS)] * 3


def test_halo_exchange_compares_its_plan():
    def worker(rank: int, **changes: Any) -> None:
        given = {"left": 1, "right": 0, "fill": 0.0} | (changes if rank == 2 else {})
        x = torch.rand(2, PARTITION.counts[rank], 5)
        halo_exchange(x, dim=1, context=CPContext(dist.group.WORLD), partition=PARTITION, **given)

    for name, value in (("left", 2), ("left", 0), ("fill", 1.0)):  # with 0 and 0 there would be nothing to send
        for kind, message in errors_of(lambda rank, name=name, value=value: worker(rank, **{name: value})):
            assert kind == "RuntimeError"
            assert f"halo_exchange: ranks disagree on {name}: rank 0 has" in message


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"partition": 2}, "TypeError", "partition must be a FramePartition or TokenPartition, got int"),
        ({"left": 1.5}, "TypeError", "interpreted as an integer"),
        ({"same": torch.ones(4).bool()}, "ValueError", "same must have shape [left + F + right] = [5], got [4]"),
        ({"same": torch.ones(5)}, "ValueError", "same must have dtype bool, got float32"),
        ({"fill": "none"}, "ValueError", "could not convert"),
    ],
    ids=["partition", "left", "shape of same", "dtype of same", "fill"],
)
def test_a_halo_that_one_rank_may_not_ask_for_fails_all(changes, kind, text):
    def worker(rank: int) -> None:
        given = {"left": 1, "partition": PARTITION} | (changes if rank == 2 else {})
        x = torch.rand(2, PARTITION.counts[rank], 5)
        halo_exchange(x, right=0, dim=1, context=CPContext(dist.group.WORLD), **given)

    for rank, (raised, message) in enumerate(errors_of(worker)):
        assert raised == kind
        assert text in message
        assert ("rank 2: " in message) == (rank != 2)


def test_a_published_halo_of_nothing_fails_all():
    found = errors_of(lambda rank: cp_halo_exchange(torch.rand(2, 3 * (rank != 1)), 1, 0, 1, dist.group.WORLD))
    assert all(kind == "ValueError" and "counts must be >= 0" in message for kind, message in found)


def test_published_functions_compare_dtypes_and_tables():
    def scan(rank: int) -> None:
        W = torch.rand(2, 3, 4, 4, dtype=torch.bfloat16 if rank == 2 else torch.float32)
        cp_frame_gdn_scan(W, W, W, W[..., 0], dist.group.WORLD)

    def fused(rank: int, name: str) -> None:
        qkv = torch.rand(1, 6, 3, 2, 4, dtype=torch.bfloat16 if (rank, name) == (2, "operand dtype") else None)
        tables, weight, given = torch.rand(2, 6, 4), None, {}
        if rank == 2 and name == "norm weights":
            weight = torch.ones(8)
        if rank == 2 and name == "tables of the query":
            given = {"rope_cos_q": torch.rand(6, 4)}
        beta, decay, group = torch.rand(1, 2, 3, 2), torch.rand(1, 2, 3), dist.group.WORLD
        cp_fused_gdn_chunkwise_raw_autograd(qkv, beta, decay, weight, None, *tables, F=3, S=2, group=group, **given)

    for kind, message in errors_of(scan):
        assert kind == "RuntimeError"
        assert "cp_frame_gdn_scan: ranks disagree on operand dtype: rank 0 has float32, rank 2 has bfloat16" in message
    for name in ("operand dtype", "norm weights", "tables of the query"):
        for _, message in errors_of(lambda rank, name=name: fused(rank, name)):
            assert f"ranks disagree on {name}: rank 0 has" in message


def test_a_digest_is_short_and_tells_plans_apart():
    assert digest((3, 4)) == digest((3, 4)) != digest((4, 3))
    assert len(digest(tuple(range(10_000)))) == 12 < DESCRIPTOR_BYTES
