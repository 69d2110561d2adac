"""The blocks on several gloo ranks against one process: outputs and every gradient, chunks, masks, sizes, exchanges."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from model_cases import (
    CLASSES,
    FRAMES,
    MASK,
    SPATIAL,
    Case,
    Outcome,
    assert_outcomes_agree,
    clip_of,
    error,
    make,
    on_one_process,
    on_this_rank,
)  # fmt: skip
from ranks import run_ranks
from torch import nn

from gdn_cp import CPContext, FramePartition, count_exchanges
from gdn_models import BidirectionalGDN, ChunkCausalGDN, FrameGDN, apply_context_parallel

pytestmark = pytest.mark.ranks

PARTITIONS = {
    2: [(4, 3), (1, 6), (0, 7), (7, 0)],
    3: [(3, 1, 3), (1, 1, 5), (0, 4, 3), (4, 0, 3), (4, 3, 0), (0, 7, 0)],
    5: [(1, 2, 0, 3, 1), (1, 1, 1, 1, 3), (0, 0, 7, 0, 0)],
}
STARTS: dict[type[nn.Module], list[tuple[int, ...] | None]] = {
    FrameGDN: [None],
    BidirectionalGDN: [None],
    ChunkCausalGDN: [None, (0, 3), (2, 4), (1, 2, 3, 5), (6,)],  # on, next to and away from rank boundaries
}
CONVOLVED = {"conv_qv": True, "conv_size": 4}


def compare(cases: Sequence[Case], size: int, tolerance: float = 1e-10, *, gradients: float | None = None) -> None:
    """Run all cases on one group of ``size`` ranks and compare each with one process."""

    def worker(rank: int) -> list[Outcome]:
        context = CPContext(dist.group.WORLD)
        return [on_this_rank(case, context) for case in cases]

    wholes = [on_one_process(case) for case in cases]
    for case, whole, *parts in zip(cases, wholes, *run_ranks(size, worker), strict=True):
        assert_outcomes_agree(case, parts, whole, tolerance, gradients=gradients)


@pytest.mark.parametrize("size", PARTITIONS)
@pytest.mark.parametrize("cls", CLASSES)
def test_ranks_equal_one_process(cls: type[nn.Module], size: int) -> None:
    """FC-D01, FC-D09, FC-D12: uneven and empty shards, chunk starts and masks that straddle ranks, all gradients."""
    compare(
        [
            Case(cls, counts, starts, mask, CONVOLVED)
            for counts in PARTITIONS[size]
            for starts in STARTS[cls]
            for mask in (None, MASK)
        ],
        size,
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_options_on_three_ranks(cls: type[nn.Module]) -> None:
    """Each key scale, no norms, no rotation, no gate, other taps; taps beyond the neighbouring ranks."""
    options = [
        {"key_scale": "dim"},
        {"key_scale": "none"},
        {"qk_norm": False, "output_gate": False, "rope_theta": None, "conv_size": 0},
        {"conv_size": 1, "rope_theta": 10.0},
        {"conv_size": 9, "norm_eps": 0.1},
    ]
    compare([Case(cls, (3, 1, 3), options=option) for option in options], 3)


@pytest.mark.parametrize("cls", CLASSES)
def test_sizes_on_three_ranks(cls: type[nn.Module]) -> None:
    """FC-S16, FC-S08: head widths that are no power of two, one head, one token a frame, no sample, one frame."""
    compare(
        [
            *(Case(cls, (2, 0, 1), options={"dim": 2 * width, "heads": 2}) for width in (40, 72, 112)),
            Case(cls, (2, 2, 3), options={"heads": 1}),
            Case(cls, (2, 2, 3), spatial=(1, 1)),
            Case(cls, (2, 2, 3), batch=0),
            Case(cls, (0, 1, 0)),
        ],
        3,
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_fp32_on_three_ranks(cls: type[nn.Module]) -> None:
    compare([Case(cls, (3, 1, 3), dtype=torch.float32)], 3, 1e-5, gradients=3e-4)


@pytest.mark.parametrize("loss_rank", [0, 2])
@pytest.mark.parametrize("cls", CLASSES)
def test_loss_on_one_rank_only(cls: type[nn.Module], loss_rank: int) -> None:
    """FC-D03: the gradient crosses ranks; what a causal block may not see gets exact zeros."""
    case = Case(cls, (2, 3, 2), options=CONVOLVED, loss_ranks=(loss_rank,))
    parts = run_ranks(3, lambda rank: on_this_rank(case, CPContext(dist.group.WORLD)))
    assert_outcomes_agree(case, parts, on_one_process(case))
    for rank, part in enumerate(parts):
        assert part.dx.any() == (rank <= loss_rank or cls is not FrameGDN)


def test_a_chunk_over_three_ranks_is_one_chunk() -> None:
    """Frames 1 to 5 are a chunk: its last frame, on the last rank, reaches its first, on the first, and not frame 0."""
    case = Case(ChunkCausalGDN, (2, 2, 3), (1, 6), options=CONVOLVED)

    def worker(rank: int) -> list[int]:
        partition = FramePartition(case.counts)
        block = apply_context_parallel(make(case), CPContext(dist.group.WORLD))
        outputs = []
        for change in (0.0, 1.0):
            x = clip_of(case)[0].clone()
            x[:, 5] += change
            x = partition.split(x, rank, 1).reshape(2, -1, 12)
            outputs.append(block(x, (case.counts[rank], 2, 1), chunk_starts=case.starts, partition=partition))
        changed = (outputs[0] != outputs[1]).reshape(2, case.counts[rank], -1).any(-1).any(0)
        return [partition.starts[rank] + f for f in changed.nonzero().flatten().tolist()]

    assert sum(run_ranks(3, worker), []) == [1, 2, 3, 4, 5, 6]


def test_padding_is_never_needed_and_changes_nothing() -> None:
    """Seven frames on two ranks as 4 + 3, and padded to 4 + 4 with an invalid frame."""
    plain = Case(BidirectionalGDN, (4, 3), options=CONVOLVED)
    x = clip_of(plain)[0]

    def worker(rank: int) -> torch.Tensor:
        block = apply_context_parallel(make(plain), CPContext(dist.group.WORLD), FramePartition((4, 4)))
        padded = torch.cat((x, 100 * torch.ones_like(x[:, :1])), 1)[:, 4 * rank : 4 * rank + 4]
        valid = (torch.arange(8) < FRAMES).expand(2, 8)[:, 4 * rank : 4 * rank + 4]
        return block(padded.reshape(2, -1, 12), (4, 2, 1), frame_valid=valid).detach()

    found = torch.cat(run_ranks(2, worker), 1)
    assert error(found[:, : FRAMES * SPATIAL], on_one_process(plain).y) < 1e-10
    assert not found[:, FRAMES * SPATIAL :].any()


@pytest.mark.parametrize(
    ("options", "exchanges"),
    [({}, 2), (CONVOLVED, 2), ({"conv_size": 1}, 1), ({"conv_size": 0}, 1)],
    ids=["conv_k", "conv_qkv", "one_tap", "no_conv"],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_exchanges_per_pass(cls: type[nn.Module], options: dict, exchanges: int) -> None:
    """One halo exchange for all convolutions and one of summaries forward, and the same backward."""
    case = Case(cls, (3, 1, 3), options=options)

    def worker(rank: int) -> list[tuple[Counter, list[str]]]:
        partition = FramePartition(case.counts)
        block = apply_context_parallel(make(case), CPContext(dist.group.WORLD), partition)
        x = partition.split(clip_of(case)[0], rank, 1).reshape(2, -1, 12).requires_grad_()
        grid = (case.counts[rank], 2, 1)
        block(x, grid).sum().backward()  # the first call also verifies that the ranks agree
        with counted_collectives() as forward, count_exchanges() as there:
            y = block(x, grid)
        with counted_collectives() as backward, count_exchanges() as back:
            y.sum().backward()
        return [(forward, there.labels), (backward, back.labels)]

    names = ["halo_exchange", "cp_frame_gdn"][-exchanges:]
    for (forward, there), (backward, back) in run_ranks(3, worker):
        assert forward.total() == exchanges, forward
        assert backward.total() == exchanges, backward
        assert there == [f"{name} forward" for name in names]
        assert back == [f"{name} backward" for name in reversed(names)]


@pytest.mark.parametrize("conv_size", [0, 4])
@pytest.mark.parametrize("wrong", ["x", "grid", "mask", "type", "partition", "none"])
def test_a_mistake_of_one_rank_is_an_error_on_all(wrong: str, conv_size: int) -> None:
    """FC-D05: within seconds, of the same class, and named; nobody is left waiting."""

    def worker(rank: int) -> tuple[str, str, float]:
        started, partition = time.monotonic(), FramePartition((3, 2, 2))
        block = apply_context_parallel(
            BidirectionalGDN(dim=8, heads=2, conv_size=conv_size), CPContext(dist.group.WORLD)
        )
        frames = partition.counts[rank]
        x, grid, keywords = torch.zeros(1, 2 * frames, 8), (frames, 2, 1), {"partition": partition}
        if rank == 1:
            x = torch.zeros(1, 2 * frames, 9) if wrong == "x" else x
            grid = {"grid": (frames - 1, 2, 1), "type": (2.0, 2, 1)}.get(wrong, grid)
            keywords.update({"mask": {"frame_valid": torch.ones(1, 7)}}.get(wrong, {}))
            if wrong in ("partition", "none"):
                keywords["partition"] = FramePartition((4, 3)) if wrong == "partition" else None
        try:
            block(x, grid, **keywords)
        except (ValueError, TypeError, RuntimeError) as error:
            return type(error).__name__, str(error), time.monotonic() - started
        raise AssertionError("no error")

    expected = {
        "x": ("ValueError", "x must have shape [B, N = F*h*w, C = dim] = [1, 4, 8], got [1, 4, 9]"),
        "grid": ("ValueError", "x must have shape [B, N = F*h*w, C = dim] = [1, 2, 8], got [1, 4, 8]"),
        "mask": ("ValueError", "frame_valid must have shape [B, F] = [1, 2], [B, 1, F] or [B, 1, F, 1, 1], got [1, 7]"),
        "type": ("TypeError", "grid must be three ints (F, h, w), got (2.0, 2, 1)"),
        "partition": ("RuntimeError", "partition must have as many ranks as the context, 3, got 2"),
        "none": ("RuntimeError", "a context of 3 ranks needs a partition"),
    }[wrong]
    for rank, (name, message, seconds) in enumerate(run_ranks(3, worker)):
        assert name == expected[0]
        assert expected[1] in message
        assert rank == 1 or "rank 1" in message
        assert seconds < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 16}, "ranks disagree on shape apart from frames"),
        ({"conv_size": 3}, "ranks disagree on left: rank 0 has 3, rank 1 has 2"),
        ({"key_scale": "dim"}, "ranks disagree on k_scale"),
        ({"heads": 4}, "ranks disagree on H: rank 0 has 2, rank 1 has 4"),
        ({"eps": 1e-3}, "ranks disagree on eps: rank 0 has 1e-08, rank 1 has 0.001"),
    ],
)
def test_ranks_that_hold_different_blocks_are_told(options: dict, message: str) -> None:
    def worker(rank: int) -> str:
        fields = {"dim": 8, "heads": 2, **(options if rank == 1 else {})}
        block = apply_context_parallel(BidirectionalGDN(**fields), CPContext(dist.group.WORLD), FramePartition((2, 2)))
        with pytest.raises(RuntimeError, match="ranks disagree") as caught:
            block(torch.zeros(1, 4, fields["dim"]), (2, 2, 1))
        return str(caught.value)

    for found in run_ranks(2, worker):
        assert message in found


class counted_collectives:  # noqa: N801, a context manager
    """Count the calls of `torch.distributed` that communicate, by name."""

    NAMES = (
        "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_reduce", "all_to_all",
        "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather",
        "irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
    )  # fmt: skip

    def __enter__(self) -> Counter:
        self.patch, counts = pytest.MonkeyPatch(), Counter()
        for name in self.NAMES:
            original = getattr(dist, name, None)
            if original is not None:

                def call(*args: object, _name: str = name, _original: object = original, **keywords: object) -> object:
                    counts[_name] += 1
                    return _original(*args, **keywords)

                self.patch.setattr(dist, name, call)
        return counts

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
