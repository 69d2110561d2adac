"""Exchanges, what counts them, and what a failed one says."""

import socket
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from gdn_cp import CPContext, collectives, count_exchanges, cp_frame_gdn
from gdn_kernels.frame_gdn import stages

pytestmark = pytest.mark.ranks


def test_gather_all_to_all_and_sum():
    def worker(rank: int) -> None:
        context = CPContext(dist.group.WORLD)
        with count_exchanges() as seen:
            gathered = collectives.all_gather(torch.full((4,), float(rank)), context, "gather")
            assert torch.equal(gathered, torch.arange(3.0)[:, None].expand(3, 4))
            send = [torch.full((rank + peer,), float(rank)) for peer in range(3)]
            received = collectives.all_to_all(send, [rank + peer for peer in range(3)], context, "swap")
            assert [x.tolist() for x in received] == [[float(peer)] * (rank + peer) for peer in range(3)]
            value = torch.tensor([1.0, rank], requires_grad=True)
            total = collectives.all_reduce_sum(value, context)
            assert total.tolist() == [3.0, 3.0]
            assert value.tolist() == [1.0, float(rank)]
        assert seen.labels == ["gather", "swap", "all_reduce_sum"]
        assert seen.sent == [16, 4 * sum(rank + peer for peer in range(3)), 8]

    run_ranks(3, worker)


@pytest.mark.parametrize(
    ("sends", "device", "expected"),
    [
        (["cpu", "cuda"], "cuda:1", "cpu"),
        (["cuda"], "cuda:1", "cuda:1"),
        (["cuda"], "cpu", "cuda"),
        (["cuda"], None, "cuda"),
    ],
)
def test_descriptors_travel_where_the_group_sends(sends, device, expected):
    """Under NCCL a rank whose tensors lie on the CPU, a mistake, still takes part in the comparison."""
    given = None if device is None else torch.device(device)
    assert collectives.descriptor_device(sends, given) == torch.device(expected)


@pytest.mark.parametrize("schedule", ["all_gather", "chain", "doubling"])
def test_local_work_runs_between_start_and_wait(schedule, monkeypatch):
    """What needs nothing from other ranks is launched while the first message travels: on every rank, once."""
    order = []
    wait, gather, batch = collectives._wait, collectives._start_gather, dist.batch_isend_irecv
    monkeypatch.setattr(collectives, "_wait", lambda work: (order.append("wait"), wait(work)))
    monkeypatch.setattr(collectives, "_start_gather", lambda *given: (order.append("start"), gather(*given))[1])
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda given: (order.append("start"), batch(given))[1])
    for kind in (stages.TorchRun, stages.TorchAdjoint):
        monkeypatch.setattr(kind, "overlap", lambda self: order.append("work"))

    def worker(rank: int) -> list[list[str]]:
        context = CPContext(dist.group.WORLD, schedule=schedule)
        found = []
        for _ in range(2):  # the first time ranks compare their arguments before
            order.clear()
            leaves = torch.rand(1, 2, 3, 1, 4, requires_grad=True), torch.rand(1, 1, 1, 2), torch.rand(1, 1, 1)
            output = cp_frame_gdn(*leaves, context=context, direction="bidirectional").output
            forward = list(order)
            order.clear()
            output.sum().backward()
            found = [forward, list(order)]
        return found

    for passes in run_ranks(2, worker):
        for steps in passes:
            assert steps.count("work") == 1
            assert steps.index("start") < steps.index("work") < steps.index("wait")


def test_the_profiler_shows_local_work_while_an_exchange_is_under_way(tmp_path, monkeypatch):
    """The other rank joins in only once this one has done its local work: a pass that waited first would never end."""

    def begins(rank: int, step: str) -> None:
        for _ in range(1500):
            if rank == 0 or (tmp_path / step).exists():
                return
            time.sleep(0.01)
        raise AssertionError(f"the other rank waits for the {step} before it has done its own work")

    def worker(rank: int) -> list[str]:
        context = CPContext(dist.group.WORLD, schedule="all_gather")
        leaves = torch.rand(1, 2, 3, 1, 4, requires_grad=True), torch.rand(1, 1, 1, 2), torch.rand(1, 1, 1)
        cp_frame_gdn(*leaves, context=context)  # the first time ranks compare their arguments before

        def work(step: str) -> None:
            with torch.profiler.record_function(f"{step} work"):
                (tmp_path / step).touch()

        if rank == 0:
            monkeypatch.setattr(stages.TorchRun, "overlap", lambda self: work("forward"))
            monkeypatch.setattr(stages.TorchAdjoint, "overlap", lambda self: work("backward"))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            begins(rank, "forward")
            output = cp_frame_gdn(*leaves, context=context).output
            begins(rank, "backward")
            output.sum().backward()
        ranges = [event for event in profile.events() if event.name.endswith("work") or "gdn_cp: " in event.name]
        return [event.name for event in sorted(ranges, key=lambda event: event.time_range.start)]

    forward, backward = "gdn_cp: cp_frame_gdn forward", "gdn_cp: cp_frame_gdn backward"
    assert run_ranks(2, worker)[0] == [forward, "forward work", forward, backward, "backward work", backward]


def test_swap_sends_what_both_sides_expect_and_counts_rounds_as_one():
    def worker(rank: int) -> None:
        context = CPContext(dist.group.WORLD)
        like = torch.zeros(1, dtype=torch.float64)
        with count_exchanges() as seen:  # the first thing this group does
            for turn in range(2):
                sends = [(peer, like.new_full((rank + peer,), rank)) for peer in range(3) if peer != rank]
                receives = [(peer, rank + peer) for peer in range(3) if peer != rank]
                found = collectives.swap(sends, receives, like, context, "swap", continued=turn > 0)
                assert [x.tolist() for x in found] == [[float(peer)] * (rank + peer) for peer, _ in receives]
            # nothing is not sent, on either side
            peers = [peer for peer in range(3) if peer != rank]
            empty = collectives.swap([(p, like[:0]) for p in peers], [(p, 0) for p in peers], like, context, "nothing")
            assert [x.numel() for x in empty] == [0, 0]
        assert seen.labels == ["swap", "nothing"]
        assert seen.sent == [2 * 8 * sum(rank + peer for peer in range(3) if peer != rank), 0]
        assert seen.messages == [4, 0]
        assert seen.total == 2

    run_ranks(3, worker)


def test_the_environment_of_a_launcher_describes_a_group(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with collectives.world_of_environment() as (group, device):
        assert device == torch.device("cpu")
        assert CPContext(group).size == 1
    assert not dist.is_initialized()


def test_a_failed_exchange_names_operation_tag_and_rank():
    def worker(rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(RuntimeError, match="did not complete") as caught:
            collectives.all_gather(torch.ones(1), CPContext(dist.group.WORLD, tag="blocks.3"), "cp_frame_gdn forward")
        assert caught.value.__cause__ is not None
        return str(caught.value)

    said = run_ranks(2, worker, timeout=1.0)[0]
    assert said == "gdn_cp: exchange of cp_frame_gdn forward (tag blocks.3) did not complete on rank 0 of 2"


def test_one_process_sums_to_itself():
    x = torch.ones(2)
    total = collectives.all_reduce_sum(x, CPContext.single())
    assert torch.equal(total, x)
    assert total.data_ptr() != x.data_ptr()
