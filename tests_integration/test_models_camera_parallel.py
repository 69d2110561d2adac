"""Blocks with a camera branch on several gloo ranks against one process: values, gradients, exchanges, dropout."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from model_cases import (
    MASK,
    Case,
    Outcome,
    assert_outcomes_agree,
    camera_of,
    clip_of,
    make,
    on_one_process,
    on_this_rank,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gdn_cp import CPContext, FramePartition, count_exchanges
from gdn_models import (
    CameraBidirectionalGDN,
    CameraChunkCausalGDN,
    CameraFrameGDN,
    apply_context_parallel,
    keep_camera,
    ray_transforms,
)

pytestmark = pytest.mark.ranks

CLASSES: Sequence[type[nn.Module]] = (CameraFrameGDN, CameraBidirectionalGDN, CameraChunkCausalGDN)
PARTITIONS = {
    2: [(4, 3)],
    3: [(3, 1, 3), (0, 1, 6), (4, 0, 3)],
    5: [(1, 2, 0, 3, 1)],
}
STARTS: dict[type[nn.Module], list[tuple[int, ...] | None]] = {
    CameraFrameGDN: [None],
    CameraBidirectionalGDN: [None],
    CameraChunkCausalGDN: [None, (2, 4), (1, 2, 3, 5)],  # on, next to and away from rank boundaries
}
WIDTH = {"dim": 24}  # three heads of eight channels
CONVOLVED = {**WIDTH, "conv_qv": True}


def compare(cases: Sequence[Case], size: int, tolerance: float = 1e-10, *, gradients: float | None = None) -> None:
    """Run all cases on one group of ``size`` ranks and compare each with one process."""

    def worker(rank: int) -> list[Outcome]:
        context = CPContext(dist.group.WORLD)
        return [on_this_rank(case, context) for case in cases]

    wholes = [on_one_process(case) for case in cases]
    for whole in wholes:
        assert any("_cam" in name and g.any() for name, g in whole.gradients.items()) or not whole.y.numel()
    for case, whole, *parts in zip(cases, wholes, *run_ranks(size, worker), strict=True):
        assert_outcomes_agree(case, parts, whole, tolerance, gradients=gradients)


@pytest.mark.parametrize("size", PARTITIONS)
@pytest.mark.parametrize("cls", CLASSES)
def test_rows_1_2_3_7_ranks_equal_one_process(cls: type[nn.Module], size: int) -> None:
    """Uneven and empty shards, chunk starts and masks that straddle ranks, halos of both branches, all gradients."""
    compare(
        [
            Case(cls, counts, starts, mask, CONVOLVED, sees=True)
            for i, counts in enumerate(PARTITIONS[size])
            for starts in STARTS[cls]
            for mask in ((MASK, None) if i == 0 else (MASK,))
        ],
        size,
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_rows_8_19_options_and_sizes_on_three_ranks(cls: type[nn.Module]) -> None:
    """Each key scale, no norms, no rotation, no gate, no and many taps; one head, one token a frame, no sample."""
    options = [
        {"key_scale": "dim"},
        {"key_scale": "none"},
        {"qk_norm": False, "output_gate": False, "rope_theta": None, "conv_size": 0},
        {"conv_size": 9, "norm_eps": 0.1, "patch_size": (1, 2, 3)},
        {"heads": 1},
        {"dim": 80, "heads": 2},
    ]
    cases = [Case(cls, (3, 1, 3), options={**WIDTH, **option}, sees=True) for option in options]
    cases += [Case(cls, (2, 2, 3), options=WIDTH, spatial=(1, 1), sees=True)]
    cases += [Case(cls, (2, 2, 3), options=WIDTH, batch=0, sees=True), Case(cls, (0, 1, 0), options=WIDTH, sees=True)]
    compare(cases, 3)


@pytest.mark.parametrize("cls", CLASSES)
def test_fp32_on_three_ranks(cls: type[nn.Module]) -> None:
    compare([Case(cls, (3, 1, 3), dtype=torch.float32, options=WIDTH, sees=True)], 3, 1e-5, gradients=3e-4)


@pytest.mark.parametrize("cls", CLASSES)
def test_loss_on_the_last_rank_only(cls: type[nn.Module]) -> None:
    """FC-D03."""
    compare([Case(cls, (2, 3, 2), options=CONVOLVED, loss_ranks=(2,), sees=True)], 3)


def test_row_3_a_chunk_over_three_ranks_is_one_chunk_to_the_camera_branch() -> None:
    """Frames 1 to 5 are a chunk: the camera of its last frame reaches its first, on another rank, and not frame 0."""
    case = Case(CameraChunkCausalGDN, (2, 2, 3), (1, 6), options=CONVOLVED, sees=True)

    def worker(rank: int) -> list[int]:
        partition = FramePartition(case.counts)
        block = apply_context_parallel(make(case), CPContext(dist.group.WORLD))
        x = partition.split(clip_of(case)[0], rank, 1).reshape(2, -1, 24)
        outputs = []
        for change in (0.0, 1.0):
            camera = camera_of(case)
            camera[:, 5, 3] += change
            given = partition.split(camera, rank, 1)
            outputs.append(block(x, (case.counts[rank], 2, 1), given, chunk_starts=case.starts, partition=partition))
        changed = (outputs[0] != outputs[1]).reshape(2, case.counts[rank], -1).any(-1).any(0)
        return [partition.starts[rank] + f for f in changed.nonzero().flatten().tolist()]

    assert sum(run_ranks(3, worker), []) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (CONVOLVED, ["halo_exchange", "cp_frame_gdn", "cp_frame_gdn_numerator"]),
        ({**WIDTH, "conv_size": 0}, ["cp_frame_gdn", "cp_frame_gdn_numerator"]),
    ],
    ids=["convolved", "none"],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_exchanges_per_pass(cls: type[nn.Module], options: dict, names: list[str]) -> None:
    """One halo exchange for the convolutions of both branches, one summary exchange each, and the same backward."""
    case = Case(cls, (3, 1, 3), options=options, sees=True)

    def worker(rank: int) -> tuple[list[str], list[str], list[str]]:
        partition = FramePartition(case.counts)
        block = apply_context_parallel(make(case), CPContext(dist.group.WORLD), partition)
        x = partition.split(clip_of(case)[0], rank, 1).reshape(2, -1, 24).requires_grad_()
        grid, camera = (case.counts[rank], 2, 1), partition.split(camera_of(case), rank, 1)
        with count_exchanges() as there:
            y = block(x, grid, ray_transforms(camera, grid))
        with count_exchanges() as back:
            y.sum().backward()
        with count_exchanges() as without:
            block(x, grid)
        return there.labels, back.labels, without.labels

    for there, back, without in run_ranks(3, worker):
        assert there == [f"{name} forward" for name in names]
        assert sorted(back) == sorted(f"{name} backward" for name in names)
        assert without == [f"{name} forward" for name in names[:-1]]


def test_row_18_branch_dropout_is_the_same_on_all_ranks_and_when_a_block_runs_again() -> None:
    """Three ranks with random generators of their own, checkpointed blocks, eight steps: equal to one process."""
    case, p, steps = Case(CameraBidirectionalGDN, (3, 1, 3), options=CONVOLVED, sees=True), 0.5, range(8)

    def train(block: nn.Module, x: Tensor, grid: tuple[int, int, int], camera: Tensor) -> list[bool]:
        kept = []
        for step in steps:

            def call(y: Tensor, step: int = step) -> Tensor:
                seen = keep_camera(p, seed=3, step=step, layer=0)
                kept.append(seen)
                return block(y, grid, camera if seen else None)

            y = checkpoint(call, x, use_reentrant=False)
            (y * (step + 1)).sum().backward()
        return kept

    def worker(rank: int) -> tuple[list[bool], dict[str, Tensor]]:
        partition = FramePartition(case.counts)
        block = apply_context_parallel(make(case), CPContext(dist.group.WORLD), partition)
        torch.manual_seed(rank)
        x = partition.split(clip_of(case)[0], rank, 1).reshape(2, -1, 24).requires_grad_()
        kept = train(block, x, (case.counts[rank], 2, 1), partition.split(camera_of(case), rank, 1))
        return kept, {name: parameter.grad for name, parameter in block.named_parameters()}

    whole = make(case)
    expected = train(whole, clip_of(case)[0].reshape(2, -1, 24).requires_grad_(), (7, 2, 1), camera_of(case))
    assert {True, False} == set(expected)
    results = run_ranks(3, worker)
    assert all(kept == expected for kept, _ in results)
    for name, parameter in whole.named_parameters():
        total = sum(gradients[name] for _, gradients in results)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=float(1e-10 * parameter.grad.abs().max()))


@pytest.mark.parametrize("conv_size", [0, 4])
def test_a_wrong_camera_on_one_rank_is_an_error_on_all(conv_size: int) -> None:
    """FC-D05: within seconds, and named."""

    def worker(rank: int) -> tuple[str, str, float]:
        started, partition = time.monotonic(), FramePartition((3, 2, 2))
        block = CameraBidirectionalGDN(dim=16, heads=2, conv_size=conv_size)
        apply_context_parallel(block, CPContext(dist.group.WORLD), partition)
        frames = partition.counts[rank]
        camera = torch.ones(1, frames, 20 if rank != 1 else 16)
        try:
            block(torch.zeros(1, 2 * frames, 16), (frames, 2, 1), camera)
        except (ValueError, RuntimeError) as error:
            return type(error).__name__, str(error), time.monotonic() - started
        raise AssertionError("no error")

    for rank, (name, message, seconds) in enumerate(run_ranks(3, worker)):
        assert name == "ValueError"
        assert "camera must have shape [B, F, 20] = [1, 2, 20], got [1, 2, 16]" in message
        assert rank == 1 or "rank 1" in message
        assert seconds < 5


@pytest.mark.parametrize("conv_size", [0, 1, 4])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_camera_on_one_rank_only_is_an_error_on_all(cls: type[nn.Module], conv_size: int) -> None:
    """FC-D05: the ranks would call different operations, with convolutions and without."""

    def worker(rank: int) -> tuple[str, float]:
        started, block = time.monotonic(), cls(dim=16, heads=2, conv_size=conv_size)
        apply_context_parallel(block, CPContext(dist.group.WORLD), FramePartition((2, 1, 1)))
        frames = (2, 1, 1)[rank]
        camera = torch.ones(1, frames, 20) if rank == 1 else None
        with pytest.raises(RuntimeError) as caught:
            block(torch.zeros(1, 2 * frames, 16), (frames, 2, 1), camera)
        return str(caught.value), time.monotonic() - started

    for message, seconds in run_ranks(3, worker):
        assert message == f"{cls.__name__}: ranks disagree on camera: rank 0 has none, rank 1 has one"
        assert seconds < 5


def test_frames_cut_into_other_rows_or_other_frequencies_are_an_error_on_all() -> None:
    """As many tokens per frame, but others next to each other: no operation would notice."""

    def worker(rank: int) -> list[str]:
        found, changes = [], ({"grid": (2, 1, 2)}, {"rope_theta": 1e3})
        for change in changes:
            given = {"grid": (2, 2, 1), "rope_theta": 1e4, **(change if rank == 1 else {})}
            block = CameraFrameGDN(dim=16, heads=2, rope_theta=given["rope_theta"])
            apply_context_parallel(block, CPContext(dist.new_group([0, 1])), FramePartition((2, 2)))
            with pytest.raises(RuntimeError) as caught:
                block(torch.zeros(1, 4, 16), given["grid"], torch.ones(1, 2, 20))
            found.append(str(caught.value))
        return found

    for rows, theta in run_ranks(2, worker):
        assert "ranks disagree on (h, w) of grid: rank 0 has (2, 1), rank 1 has (1, 2)" in rows
        assert "ranks disagree on rope_theta: rank 0 has 10000.0, rank 1 has 1000.0" in theta


def test_a_camera_that_one_rank_drops_later_is_an_error_where_every_call_is_compared() -> None:
    def worker(rank: int) -> str:
        block = CameraFrameGDN(dim=16, heads=2, conv_size=0)
        apply_context_parallel(block, CPContext(dist.group.WORLD, validate="always"), FramePartition((2, 2)))
        x, camera = torch.zeros(1, 4, 16), torch.ones(1, 2, 20)
        for seen in (camera, None, camera):
            block(x, (2, 2, 1), seen)
        with pytest.raises(RuntimeError, match="ranks disagree on camera: rank 0 has one, rank 1 has none") as caught:
            block(x, (2, 2, 1), None if rank else camera)
        return str(caught.value)

    run_ranks(2, worker)
