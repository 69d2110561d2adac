"""What ranks promise whatever carries their messages: tests that run over gloo on CPUs and over NCCL on GPUs.

They are collected by the modules that import them, `test_rank_claims` and `gpu/test_nccl_gpu`, each of which says with
a fixture ``ranks`` which ranks they run on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import clips
import delta_product_gpu
import frame_shares
import pytest
import torch
import torch.distributed as dist
from clips import Clip
from delta_product_shares import PER_STEP
from delta_product_shares import Share as TokenShare
from delta_product_shares import error as token_error
from frame_shares import Share
from published import Case, call
from ranks import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdn_cp import (
    CPContext,
    FramePartition,
    TokenPartition,
    count_exchanges,
    cp_frame_gdn,
    cp_frame_gdn_numerator,
    cp_frame_gdn_scan,
    cp_halo_exchange,
    cp_scan_states_to_phase_c_states,
    halo_exchange,
    keep_exchanges,
    phase_a_to_cp_scan_transitions,
)
from gdn_cp.cost_model import SCHEDULES, measure_link
from gdn_cp.delta_product import TorchGatedDeltaProductCPBackend

LARGER = 1.25  # bf16: what ranks may cost beside one device; folds and summaries are fp32
FP32 = 1e-4  # ieee, relative
LIMIT = 300.0  # seconds of a claim, kernels compiled for every rank


def counts_of(size: int) -> tuple[int, ...]:
    """Return uneven shards; the second of three ranks or more is empty, and later ones have a frame each."""
    return {1: (3,), 2: (3, 2)}.get(size, (3, 0, 2, *(1,) * (size - 3)))


def share_of(ranks: RankPool, width: int, dtype: torch.dtype = torch.float32, size: int | None = None) -> Share:
    """Return a clip for the ranks, as large as their device is worth."""
    spatial, heads = (96, 3) if ranks.device == "cuda" else (6, 2)
    return Share(counts_of(size or ranks.size), spatial, heads, width, dtype, "all_gather", ranks.device)


@contextlib.contextmanager
def no_wait_on_the_host(device: str) -> Iterator[None]:
    """Raise if the host waits for a GPU inside the block."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Values


def compare_with_one_device(share: Share, rank: int, group: Sequence[int] | None = None) -> Any:
    """Return what `errors_of` does on all schedules; None of a rank that is not in the group."""
    members = None if group is None else dist.new_group(list(group))
    if group is not None and rank not in group:
        return None
    return frame_shares.errors_of(share, SCHEDULES, CPContext(members or dist.group.WORLD))


def check_errors(found: Any, dtype: torch.dtype) -> None:
    results, alone = found
    assert list(results) == list(SCHEDULES)
    for schedule, (errors, exchanges) in results.items():
        assert exchanges == ["cp_frame_gdn forward", "cp_frame_gdn backward"]
        for name, value in errors.items():
            bound = FP32 if dtype == torch.float32 else LARGER * alone[name]
            assert value <= bound, f"{name} by {schedule}: {value:.2e}, one device {alone[name]:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [32, 64, 112, 128])
def test_output_and_gradients_are_those_of_one_device(ranks: RankPool, width: int, dtype: torch.dtype) -> None:
    """Per rank, every schedule, uneven shards, one of them empty where there are three ranks or more."""
    worker = functools.partial(compare_with_one_device, share_of(ranks, width, dtype))
    for found in ranks.run(worker, limit=LIMIT):
        check_errors(found, dtype)


def test_a_group_need_not_have_the_first_rank(ranks: RankPool) -> None:
    """FC-D03: messages go to ranks of the world, schedules know those of the group."""
    if ranks.size < 3:
        pytest.skip("needs three ranks")
    share = share_of(ranks, 64, size=ranks.size - 1)
    worker = functools.partial(compare_with_one_device, share, group=range(1, ranks.size))
    first, *others = ranks.run(worker, limit=LIMIT)
    assert first is None
    for found in others:
        check_errors(found, share.dtype)


CLIPS = [
    Clip(starts=(0, 2, 5), masked=True), Clip(kind="raw", direction="forward"), Clip(kind="numerator"),
    Clip(kind="raw", direction="reverse", starts=(3,)),
]  # fmt: skip


def moved(x: Any, device: str) -> Any:
    """Return tensors on a device, in whatever holds them."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, Mapping):
        return {name: moved(y, device) for name, y in x.items()}
    return type(x)(*(moved(y, device) for y in x)) if isinstance(x, tuple) else x


def clips_on_rank(cases: Sequence[Clip], counts: tuple[int, ...], device: str, rank: int) -> Any:
    """Return results and gradients of this rank, on the CPU."""
    context, partition, found = CPContext(dist.group.WORLD), FramePartition(counts), []
    for clip in cases:
        leaves = clips.shard_leaves(clip, partition, rank)
        arguments = moved(clips.shard_arguments(clip, partition, rank, leaves), device)
        result = clips.CP_OPS[clip.kind](context=context, partition=partition, chunk_starts=clip.starts, **arguments)
        results = moved(clips.results_of(result), "cpu")
        grads = clips.gradients(clips.shard_loss(clip, partition, rank, results), leaves)
        found.append(({name: x.detach() for name, x in results.items()}, grads))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_chunks_masks_and_states_are_those_of_one_device(ranks: RankPool, dtype: torch.dtype) -> None:
    """Initial and final states and their gradients; fp64 in torch, fp32 in what the device has."""
    counts = {2: (4, 3), 3: (3, 0, 4)}.get(ranks.size, (2, 0, 3, 2, *(0,) * (ranks.size - 4)))
    cases = [dataclasses.replace(clip, dtype=dtype) for clip in CLIPS]
    found = ranks.run(functools.partial(clips_on_rank, cases, counts, ranks.device), limit=LIMIT)
    bounds = (1e-10, 1e-10) if dtype == torch.float64 else (FP32, 3 * FP32)
    for clip, of_ranks in zip(cases, zip(*found, strict=True), strict=True):
        clips.compare(clip, FramePartition(counts), of_ranks, *bounds)


# What travels


def count_on_rank(share: Share, cases: Sequence[dict[str, Any]], rank: int) -> list[tuple[list[str], list[int]]]:
    """Return labels and bytes of a step's exchanges, of each case."""
    leaves, span, found = frame_shares.draw(share), share.partition.span(rank), []
    given = frame_shares.arguments(share, leaves, span)
    for case in cases:
        context = CPContext(dist.group.WORLD, schedule=case["schedule"], save_transitions=case["save"])
        common: dict[str, Any] = {"context": context, "partition": share.partition, "direction": case["direction"]}
        with count_exchanges() as seen:
            if case["streams"] == 2:
                result = cp_frame_gdn(**{**given, **common}).output
            else:
                q, k, v = given["qkv"].unbind(2)
                result = cp_frame_gdn_numerator(q, k, v, given["beta"], given["decay"], **common).numerator
            result.sum().backward()
        found.append((seen.labels, seen.sent))
    return found


def promised_bytes(share: Share, case: dict[str, Any], size: int, rank: int) -> list[int]:
    """Return the bytes of section 6 and 9 of the design that a rank sends in the two passes."""
    square, vector = share.width**2, share.width if case["streams"] == 2 else 0
    transitions, state, unit = case["streams"] * square, square + vector, 4 * share.heads
    directions = 2 if case["direction"] == "bidirectional" else 1
    if case["schedule"] == "all_gather":
        again = 0 if case["save"] else transitions
        return [unit * (transitions + directions * state), unit * (again + directions * state)]
    distances = [1] if case["schedule"] == "chain" else [2**n for n in range((size - 1).bit_length())]
    message = unit * (state if case["schedule"] == "chain" else transitions + state)
    up = sum(rank + distance < size for distance in distances)
    down = sum(rank >= distance for distance in distances)
    return [message * (up + down)] * 2 if directions == 2 else [message * up, message * down]


def test_one_exchange_per_pass_with_the_bytes_of_the_table(ranks: RankPool) -> None:
    share = share_of(ranks, 64)
    cases = [
        {"schedule": schedule, "save": save, "direction": direction, "streams": streams}
        for schedule in SCHEDULES
        for save, direction, streams in (
            (True, "bidirectional", 2), (False, "bidirectional", 2), (True, "forward", 2), (True, "bidirectional", 1),
        )
    ]  # fmt: skip
    for rank, found in enumerate(ranks.run(functools.partial(count_on_rank, share, cases), limit=LIMIT)):
        for case, (labels, sent) in zip(cases, found, strict=True):
            assert [label.split()[-1] for label in labels] == ["forward", "backward"], case
            assert sent == promised_bytes(share, case, ranks.size, rank), (case, rank)


def checkpointed_on_rank(share: Share, rank: int) -> Any:
    """Return the exchanges of a step, of one under a checkpoint, and whether their gradients are equal."""
    context, span, found = CPContext(dist.group.WORLD), share.partition.span(rank), []

    def call_on(leaves: dict[str, Tensor]) -> Tensor:
        return frame_shares.run(share, leaves, span, context, share.impl)

    def recomputed(leaves: dict[str, Tensor]) -> Tensor:
        result: Tensor = checkpoint(call_on, leaves, use_reentrant=False, context_fn=keep_exchanges)
        return result

    for function in (call_on, recomputed):
        leaves = frame_shares.draw(share)
        with count_exchanges() as seen:
            function(leaves).square().sum().backward()
        found.append(([label.split()[-1] for label in seen.labels], [x.grad for x in leaves.values()]))
    (plain, grads), (kept, others) = found
    return plain, kept, all(torch.equal(x, y) for x, y in zip(grads, others, strict=True))


def test_a_checkpoint_repeats_no_exchange(ranks: RankPool) -> None:
    """FC-D14: 1 + 1 exchanges, the same gradients."""
    both = ["forward", "backward"]
    worker = functools.partial(checkpointed_on_rank, share_of(ranks, 64))
    assert ranks.run(worker, limit=LIMIT) == [(both, both, True)] * ranks.size


def test_a_link_is_measured_and_is_the_same_on_every_rank(ranks: RankPool) -> None:
    links = ranks.run(functools.partial(measure_on_rank, ranks.device), limit=LIMIT)
    assert len(set(links)) == 1
    assert min(links[0]) > 0


def measure_on_rank(device: str, rank: int) -> tuple[float, ...]:
    link = measure_link(CPContext(dist.group.WORLD), device, width=64, heads=2, repeats=3)
    return link.latency, link.bandwidth, link.fold, link.compose, link.advance


# Steady state


def repeat_on_rank(share: Share, rank: int) -> bool:
    """Whether a step without a wait on the host gives the bits of the one before."""
    context, span = CPContext(dist.group.WORLD, schedule=share.schedule), share.partition.span(rank)
    leaves = frame_shares.draw(share)
    own = frame_shares.upstream(share)[:, span.start * share.spatial : span.stop * share.spatial].to(share.dtype)

    def train() -> list[Tensor]:
        output = frame_shares.run(share, leaves, span, context, share.impl)
        return [output.detach(), *torch.autograd.grad(output, list(leaves.values()), own)]

    first = train()  # compiles, and makes the small tables that later calls find
    with no_wait_on_the_host(share.device):
        second = train()
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_repeats_to_the_last_bit_and_waits_for_nothing(ranks: RankPool, schedule: str) -> None:
    share = share_of(ranks, 64, torch.bfloat16)._replace(schedule=schedule)
    assert ranks.run(functools.partial(repeat_on_rank, share), limit=LIMIT) == [True] * ranks.size


@pytest.mark.parametrize("schedule", ["all_gather", "chain"])
def test_a_compiled_step_is_one_graph_and_equals_the_eager_one(ranks: RankPool, schedule: str) -> None:
    if ranks.device == "cpu" and ranks.size > 2:
        pytest.skip("two ranks compile the same graph, for seconds each")
    share = share_of(ranks, 64)._replace(schedule=schedule)
    backend = "inductor" if ranks.device == "cuda" else "aot_eager"
    worker = functools.partial(frame_shares.compiled_worker, share, backend=backend)
    for found, exchanges in ranks.run(worker, limit=LIMIT):
        assert exchanges == ["cp_frame_gdn forward", "cp_frame_gdn backward"]
        assert found.keys() >= {"output", "qkv", "beta", "decay"}
        for name, value in found.items():
            assert value <= 1e-6, f"{name}: {value:.2e}"


def disagree_on_rank(share: Share, rank: int) -> tuple[str, bool]:
    """Return what this rank is told if the last one has a head less, and whether a call still works."""
    context, last = CPContext(dist.group.WORLD, validate="always"), share.partition.size - 1
    wrong = share._replace(heads=share.heads - 1) if rank == last else share
    with pytest.raises(RuntimeError) as caught:
        frame_shares.run(wrong, frame_shares.draw(wrong), share.partition.span(rank), context, share.impl)
    output = frame_shares.run(share, frame_shares.draw(share), share.partition.span(rank), context, share.impl)
    return str(caught.value), bool(output.isfinite().all())


def test_ranks_that_disagree_are_told_on_every_rank(ranks: RankPool) -> None:
    """FC-D05: before anything of unequal sizes is sent."""
    share, last = share_of(ranks, 32), ranks.size - 1
    text = f"cp_frame_gdn: ranks disagree on H: rank 0 has {share.heads}, rank {last} has {share.heads - 1}"
    assert ranks.run(functools.partial(disagree_on_rank, share), limit=LIMIT) == [(text, True)] * ranks.size


# Halos

HALOS = [(0, 3), (3, 0), (2, 1), (4, 4)]


def row_of(counts: tuple[int, ...], device: str) -> Tensor:
    """Return a clip of small whole numbers, whose sums are exact."""
    numbers = torch.arange(2 * sum(counts) * 3, dtype=torch.float32).remainder(17)
    return numbers.view(2, -1, 3).to(device)


def halos_on_rank(cuts: Sequence[tuple[int, ...]], device: str, rank: int) -> list[Any]:
    """Return the extended frames, their gradient and the exchanges, for every cut and halo; published ones last."""
    context, found = CPContext(dist.group.WORLD), []

    def step(x: Tensor, exchange: Callable[[Tensor], Tensor]) -> None:
        x = x.clone().requires_grad_()
        with count_exchanges() as seen:
            y = exchange(x)
            y.backward(weights(y, rank))
        assert x.grad is not None
        found.append((y.detach().cpu(), x.grad.cpu(), [label.split()[-1] for label in seen.labels]))

    for counts in cuts:
        partition = FramePartition(counts)
        for left, right in HALOS:
            step(
                partition.split(row_of(counts, device), rank, 1),
                lambda x, n=left, m=right, p=partition: halo_exchange(x, n, m, 1, context, p, fill=-1.0),
            )  # fmt: skip
    equal = (2,) * context.size
    for left, right in HALOS:
        step(
            FramePartition(equal).split(row_of(equal, device), rank, 1),
            lambda x, n=left, m=right: cp_halo_exchange(x, n, m, 1, dist.group.WORLD),
        )  # fmt: skip
    return found


def weights(y: Tensor, rank: int) -> Tensor:
    """Return the gradient that arrives at extended frames, another one on every rank."""
    return torch.arange(y.numel(), dtype=y.dtype, device=y.device).remainder(7).view_as(y) + rank


def test_halos_are_the_frames_around_and_their_gradients_come_back(ranks: RankPool) -> None:
    """FC-D06: over short and empty ranks, several owners; exact; one exchange per pass."""
    size = ranks.size
    cuts = [counts_of(size), (0, *counts_of(size)[1:-1], 4), (1,) * size]
    found = ranks.run(functools.partial(halos_on_rank, cuts, ranks.device), limit=LIMIT)
    cases = [(counts, halo, -1.0) for counts in cuts for halo in HALOS] + [((2,) * size, halo, 0.0) for halo in HALOS]
    for i, (counts, (left, right), fill) in enumerate(cases):
        x, partition = row_of(counts, "cpu").requires_grad_(), FramePartition(counts)
        padded = torch.nn.functional.pad(x, (0, 0, left, right), value=fill)
        loss = torch.zeros(())
        for rank in range(size):
            y, _, labels = found[rank][i]
            length = left + counts[rank] + right if counts[rank] else 0
            expected = padded[:, partition.starts[rank] : partition.starts[rank] + length]
            assert torch.equal(y, expected), (counts, left, right, rank)
            assert labels == ["forward", "backward"]
            loss = loss + (expected * weights(expected, rank)).sum()
        (expected_gradient,) = torch.autograd.grad(loss, x)
        assert torch.equal(torch.cat([found[rank][i][1] for rank in range(size)], 1), expected_gradient)


# Published functions


def published_cases(size: int) -> list[Case]:
    """Return calls of the published functions: both orders of ranks, truncation, camera, tables of the query."""
    uneven, equal = counts_of(size), (2,) * size
    return [
        Case(uneven, reverse=True, weights="q"), Case(equal, truncate=3), Case(uneven, camera=True),
        Case(equal, camera=True, truncate=2, beta_dims=3), Case(uneven, query_tables=True, use_checkpoint=False),
    ]  # fmt: skip


def published_on_rank(cases: Sequence[Case], device: str, rank: int) -> Any:
    """Return results and gradients of this rank in fp32, on the CPU, and the passes that exchanged."""
    found, labels = [], []
    for case in cases:
        leaves = {name: case.cut(name, x, rank).float().clone() for name, x in case.tensors().items()}
        wanted = {name: x.requires_grad_() for name, x in leaves.items() if not name.startswith("rope")}
        with count_exchanges() as seen:
            results = moved(call(case, moved(leaves, device), case.counts[rank], dist.group.WORLD), "cpu")
            grads = torch.autograd.grad(case.rank_loss(rank, results), list(wanted.values()))
        found.append(({n: x.detach() for n, x in results.items()}, dict(zip(wanted, grads, strict=True))))
        labels.append([label.split()[-1] for label in seen.labels])
    return found, labels


def test_published_functions_equal_their_transcription(ranks: RankPool) -> None:
    cases = published_cases(ranks.size)
    found = ranks.run(functools.partial(published_on_rank, cases, ranks.device), limit=LIMIT)
    for i, case in enumerate(cases):
        case.compare([results[i] for results, _ in found], FP32)
    assert all(labels == [["forward", "backward"]] * len(cases) for _, labels in found)


def operators_of(frames: int) -> list[Tensor]:
    """Return I - P, A of both streams and decays of a whole clip, padded: ``[B*H, T, 8, 8]`` and so on, fp64."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    eye = torch.eye(8, dtype=torch.float64)
    kv, z = (eye - 0.2 * normal(3, frames, 8, 8) for _ in range(2))
    return [kv, normal(3, frames, 8, 8), z, normal(3, frames, 8), normal(3, frames).sigmoid()]


def scanned(given: Sequence[Tensor], span: range, group: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states of a span, through adapters and scan, and the gradients of operators and decays."""
    leaves = [x[:, span.start : span.stop].clone().requires_grad_() for x in given]
    bundle = phase_a_to_cp_scan_transitions(*leaves, head_dim=6)
    S_kv, S_z = cp_frame_gdn_scan(bundle.W_kv, bundle.U_kv, bundle.W_z, bundle.U_z, group)
    states = list(cp_scan_states_to_phase_c_states(S_kv, S_z, block_d=8))
    loss = sum(((1 + x.shape[-1] % 3) * x).square().sum() for x in states)
    grads = torch.autograd.grad(loss, leaves)  # type: ignore[arg-type]
    return [x.detach().cpu() for x in states], [x.cpu() for x in grads]


def scan_on_rank(counts: tuple[int, ...], device: str, rank: int) -> Any:
    given = [x.to(device, torch.float32) for x in operators_of(sum(counts))]
    return scanned(given, FramePartition(counts).span(rank), dist.group.WORLD)


def test_published_scan_and_adapters_equal_one_device(ranks: RankPool) -> None:
    """Transitions that are not symmetric; every rank's states and gradients."""
    partition = FramePartition(counts_of(ranks.size))
    whole = scanned(operators_of(partition.total), range(partition.total), CPContext.single())
    found = ranks.run(functools.partial(scan_on_rank, partition.counts, ranks.device), limit=LIMIT)
    for rank, parts in enumerate(found):
        for part, exact in zip([*parts[0], *parts[1]], [*whole[0], *whole[1]], strict=True):
            own = partition.split(exact, rank, 1)
            assert part.shape == own.shape
            difference = (part.double() - own).abs()
            assert not difference.numel() or float(difference.max() / exact.abs().max()) <= FP32, rank


# Gated delta product


def delta_on_rank(shares: Sequence[TokenShare], kind: str, device: str, rank: int) -> Any:
    """Return errors against the recurrence in fp64 and the exchanges, for every share and schedule."""
    is_fla, found = kind == "fla", []
    backend = delta_product_gpu.backend_with_few_configurations() if is_fla else TorchGatedDeltaProductCPBackend()
    dtype = torch.bfloat16 if is_fla else torch.float32
    for share in shares:
        exact, span = share.exact(dtype, device), TokenPartition(share.counts).span(rank)
        for schedule in SCHEDULES:
            context = CPContext(dist.group.WORLD, schedule=schedule)
            delta_product_gpu.step(share, rank, context, backend, dtype, device)
            with count_exchanges() as seen:
                results = delta_product_gpu.step(share, rank, context, backend, dtype, device)
            for name in ("final_state", "dinitial_state"):  # each sequence's on one rank, zero on the others
                dist.all_reduce(results[name])
            errors = {}
            for name, x in results.items():
                steps = share.steps if name[1:] in PER_STEP else 1
                whole = name in ("final_state", "dinitial_state")
                own = exact[name] if whole else exact[name][:, span.start * steps : span.stop * steps]
                errors[name] = token_error(x, own)
            found.append((schedule, errors, list(seen.labels)))
    return found


@pytest.mark.parametrize("kind", ["torch", "fla"])
def test_the_gated_delta_product_equals_the_recurrence(ranks: RankPool, kind: str) -> None:
    """Batch rows, and packed sequences of which one lies on all ranks; every schedule, one exchange per pass."""
    if kind == "fla" and (ranks.device == "cpu" or importlib.util.find_spec("fla") is None):
        pytest.skip("needs CUDA devices and the package fla-core")
    counts = (70, 120, 0, *(40,) * (ranks.size - 3))[: ranks.size]
    if kind == "torch":
        counts = tuple(count // 10 for count in counts)
    total, sizes = sum(counts), {"steps": 2, "heads": (2, 2), "strength": 1.0}
    widths = (64, 64) if kind == "fla" else (8, 8)
    shares = [TokenShare(counts, lengths, widths=widths, **sizes) for lengths in (None, (2, total - 2))]  # type: ignore[arg-type]
    states, gradients, gates = (4e-3, 8e-3, 1.5e-2) if kind == "fla" else (FP32,) * 3  # as in test_delta_product_gpu
    worker = functools.partial(delta_on_rank, shares, kind, ranks.device)
    for found in ranks.run(worker, limit=3 * LIMIT):
        for schedule, errors, labels in found:
            assert labels == ["chunkwise_cp forward", "chunkwise_cp backward"]
            for name, value in errors.items():
                bound = gates if name in ("dbeta", "dg") else gradients if name.startswith("d") else states
                assert value <= bound, f"{name} by {schedule}: {value:.2e}"


CLAIMS = [name for name in globals() if name.startswith("test_")]
