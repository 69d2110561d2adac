"""Disagreement or failure of one rank is the right error on all of them, within seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clips import Clip, shard_arguments, shard_leaves
from ranks import run_ranks

from gdn_cp import CPContext, FramePartition, cp_frame_gdn, halo_exchange
from gdn_cp.handshake import DESCRIPTOR_BYTES, digest

pytestmark = pytest.mark.ranks
PARTITION = FramePartition((3, 0, 4))


def call(rank: int, context: CPContext, changes: dict[str, Any], partition: FramePartition | None = PARTITION):
    clip = Clip()
    arguments = shard_arguments(clip, PARTITION, rank, shard_leaves(clip, PARTITION, rank))
    return cp_frame_gdn(context=context, partition=partition, **{**arguments, **changes})


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
    ],
    ids=["ValueError", "TypeError", "NotImplementedError"],
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


def test_halo_exchange_compares_its_plan():
    def worker(rank: int) -> None:
        x = torch.rand(2, PARTITION.counts[rank], 5)
        halo_exchange(x, 1 + (rank == 2), 0, 1, CPContext(dist.group.WORLD), PARTITION)

    assert all("halo_exchange: ranks disagree on left" in message for _, message in errors_of(worker))


def test_a_digest_is_short_and_tells_plans_apart():
    assert digest((3, 4)) == digest((3, 4)) != digest((4, 3))
    assert len(digest(tuple(range(10_000)))) == 12 < DESCRIPTOR_BYTES
