"""Training on several gloo ranks: losses, sums of gradients, frozen ranks, checkpoints, several groups."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from model_cases import (
    CLASSES,
    Case,
    Outcome,
    assert_outcomes_agree,
    camera_of,
    clip_of,
    error,
    make,
    on_one_process,
    run,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gdn_cp import CPContext, FramePartition, join_backward
from gdn_models import (
    BidirectionalGDN,
    CameraBidirectionalGDN,
    CameraChunkCausalGDN,
    CameraFrameGDN,
    ChunkCausalGDN,
    FrameGDN,
    all_reduce_gradients,
    apply_context_parallel,
    reduce_loss,
)

pytestmark = pytest.mark.ranks

C, GRID_2D, TOKENS = 12, (2, 1), 2


class Denoiser(nn.Module):
    """Two blocks between projections, as a small video model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(C, C)
        self.blocks = nn.ModuleList(BidirectionalGDN(dim=C, heads=3) for _ in range(2))
        self.leave = nn.Linear(C, C)

    def forward(self, x: Tensor, grid: tuple[int, int, int], partition: FramePartition | None = None) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x, grid, partition=partition)
        return self.leave(x)


def denoiser() -> Denoiser:
    """Return the model with random weights, the same on every process."""
    torch.manual_seed(11)
    model = Denoiser()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model.double()


def sample(seed: int, frames: int = 7) -> Tensor:
    """Return a clip ``[1, F, S*C]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, frames, TOKENS * C, generator=generator, dtype=torch.float64)


def mean_loss(model: nn.Module, x: Tensor, partition: FramePartition | None = None) -> Tensor:
    """Return the mean square of the output over the tokens of ``x [1, F, S*C]``; NaN without tokens."""
    grid = (x.shape[1], *GRID_2D)
    return model(x.reshape(1, x.shape[1] * TOKENS, C), grid, partition).square().mean()


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_gradients_agree(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert error(found[name], gradient) <= tolerance, name


@pytest.fixture(scope="module")
def one_process() -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one clip on one process."""
    model = denoiser()
    loss = mean_loss(model, sample(1))
    loss.backward()
    return loss.item(), gradients_of(model)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("counts", [(4, 3), (3, 1, 3), (4, 0, 3), (0, 7)])
def test_reduce_loss_gives_wrappers_that_average_the_right_gradient(
    counts: tuple[int, ...], as_tensor: bool, one_process: tuple[float, dict[str, Tensor]]
) -> None:
    """FC-D11: value and averaged gradient are those of the mean over all tokens; a rank without tokens has NaN."""
    loss, expected = one_process

    def worker(rank: int) -> tuple[float, dict[str, Tensor]]:
        context, partition = CPContext(dist.group.WORLD), FramePartition(counts)
        model = apply_context_parallel(denoiser(), context)
        n = counts[rank] * TOKENS
        local = mean_loss(model, partition.split(sample(1), rank, 1), partition)
        reduced = reduce_loss(local, context, torch.tensor(n) if as_tensor else n)
        reduced.backward()
        return reduced.item(), gradients_of(model)

    results = run_ranks(len(counts), worker)
    assert len({value for value, _ in results}) == 1
    assert results[0][0] == pytest.approx(loss, rel=1e-10)
    average = {name: torch.stack([g[name] for _, g in results]).mean(0) for name in expected}
    assert_gradients_agree(average, expected)


@pytest.mark.parametrize("counts", [(3, 1, 3), (4, 0, 3)])
def test_all_reduce_gradients_gives_every_rank_the_gradient(
    counts: tuple[int, ...], one_process: tuple[float, dict[str, Tensor]]
) -> None:
    """The plain way: each rank's part of a sum over all tokens, then one sum of all gradients."""
    loss, expected = one_process

    def worker(rank: int) -> tuple[float, dict[str, Tensor]]:
        context, partition = CPContext(dist.group.WORLD), FramePartition(counts)
        model = apply_context_parallel(denoiser(), context)
        x = partition.split(sample(1), rank, 1)
        y = model(x.reshape(1, -1 if x.numel() else 0, C), (x.shape[1], *GRID_2D), partition)
        part = y.square().sum() / sample(1).numel()
        part.backward()
        all_reduce_gradients(model, context, bucket_numel=500)
        return part.item(), gradients_of(model)

    results = run_ranks(len(counts), worker)
    assert sum(value for value, _ in results) == pytest.approx(loss, rel=1e-10)
    for _, found in results:
        assert_gradients_agree(found, expected)


def test_all_reduce_gradients_where_ranks_lack_gradients() -> None:
    """None counts as zero; what nobody has stays None; what is frozen here stays None here."""

    def worker(rank: int) -> list[Tensor | None]:
        parameters = [nn.Parameter(torch.zeros(2, 2)) for _ in range(4)]
        parameters[3].data = parameters[3].data.bfloat16()
        for i, parameter in enumerate(parameters):
            if i != 1 and (i, rank) not in ((0, 2), (2, 1)):
                parameter.grad = torch.full_like(parameter, 10.0**rank)
        parameters[2].requires_grad_(rank != 1)
        kept = parameters[0].grad
        all_reduce_gradients(parameters, CPContext(dist.group.WORLD))
        assert kept is None or parameters[0].grad is kept, "in place, so that views of gradients stay views"
        return [p.grad for p in parameters]

    results = run_ranks(3, worker)
    for rank, (first, second, third, fourth) in enumerate(results):
        assert torch.equal(first, torch.full((2, 2), 11.0))
        assert second is None
        assert third is None if rank == 1 else torch.equal(third, torch.full((2, 2), 101.0))
        assert torch.equal(fourth, torch.full((2, 2), 111.0, dtype=torch.bfloat16))


SEEING = {"options": {"dim": 24}, "sees": True}  # three heads of eight channels, and a camera


@pytest.mark.parametrize(
    ("pair", "four"),
    [
        (Case(BidirectionalGDN, (3, 4)), Case(FrameGDN, (2, 1, 3, 1))),
        (Case(CameraBidirectionalGDN, (3, 4), **SEEING), Case(CameraFrameGDN, (2, 1, 3, 1), **SEEING)),
    ],
    ids=["main", "camera"],
)
def test_two_models_use_two_groups_and_a_group_need_not_be_the_world(pair: Case, four: Case) -> None:
    """FC-D02: groups {0, 1} and {0, 1, 2, 3} alive in one process, and then {1, 3}, which lacks global rank 0."""

    def worker(rank: int) -> list[Outcome | None]:
        first, other = dist.new_group([0, 1]), dist.new_group([1, 3])
        parts = [(four, CPContext(dist.group.WORLD))]
        parts += [(pair, CPContext(first))] if rank in (0, 1) else []
        parts += [(pair, CPContext(other))] if rank in (1, 3) else []
        # every context is attached before anything runs, so that the one attached last could replace the others
        blocks = [apply_context_parallel(make(case), context) for case, context in parts]
        found = []
        for (case, context), block in zip(parts, blocks, strict=True):
            partition, own = FramePartition(case.counts), context.rank
            found.append(run(case, block, partition.starts[own], case.counts[own], partition))
        narrow, last = found[1] if rank in (0, 1) else None, found[-1] if rank in (1, 3) else None
        blocks[0].zero_grad()
        partition = FramePartition(four.counts)
        again = run(four, blocks[0], partition.starts[rank], four.counts[rank], partition)
        return [found[0], narrow, last, again]

    wide, narrow, last, again = zip(*run_ranks(4, worker), strict=True)
    for parts in (wide, again):
        assert_outcomes_agree(four, parts, on_one_process(four))
    for parts in (narrow, last):
        assert_outcomes_agree(pair, [part for part in parts if part is not None], on_one_process(pair))


def local_keywords(case: Case, partition: FramePartition, rank: int) -> dict[str, object]:
    """Return the keywords of a rank's call."""
    keywords: dict[str, object] = {} if case.starts is None else {"chunk_starts": case.starts}
    return keywords | ({"camera": partition.split(camera_of(case), rank, 1)} if case.sees else {})


@pytest.mark.parametrize("frozen_rank", [0, 1, 2])
@pytest.mark.parametrize(
    "case",
    [Case(BidirectionalGDN, (3, 2, 2)), Case(CameraBidirectionalGDN, (3, 2, 2), **SEEING)],
    ids=["main", "camera"],
)
def test_a_block_frozen_on_one_rank_only_still_passes_gradients_on(case: Case, frozen_rank: int) -> None:
    """FC-D07: neither parameters nor input of one rank need a gradient; the other ranks' gradients do not change."""

    def worker(rank: int) -> Outcome:
        partition = FramePartition(case.counts)
        block = apply_context_parallel(make(case), CPContext(dist.group.WORLD), partition)
        frozen = rank == frozen_rank
        block.requires_grad_(not frozen)
        x, upstream = (partition.split(y, rank, 1).reshape(2, -1, block.config.dim) for y in clip_of(case))
        x = x.detach().requires_grad_(not frozen)
        y = block(x, (case.counts[rank], *GRID_2D), **local_keywords(case, partition, rank))
        join_backward((y * upstream).sum(), y).backward()
        return Outcome(y.detach(), x.grad, gradients_of(block))

    parts = run_ranks(3, worker)
    whole = on_one_process(case)
    starts = FramePartition(case.counts).starts
    for rank, part in enumerate(parts):
        span = slice(starts[rank] * TOKENS, starts[rank + 1] * TOKENS)
        assert error(part.y, whole.y[:, span]) < 1e-10
        if rank == frozen_rank:
            assert part.dx is None
            assert not any(gradient is not None for gradient in part.gradients.values())
        else:
            assert error(part.dx, whole.dx[:, span]) < 1e-10


@pytest.mark.parametrize(
    "case",
    [
        *(Case(cls, (3, 0, 4), (0, 2) if cls is ChunkCausalGDN else None) for cls in CLASSES),
        Case(CameraChunkCausalGDN, (3, 0, 4), (0, 2), **SEEING),
    ],
    ids=lambda case: case.cls.__name__,
)
def test_no_grad_everywhere_gives_the_outputs(case: Case) -> None:
    def worker(rank: int) -> list[Tensor]:
        partition = FramePartition(case.counts)
        block = apply_context_parallel(make(case), CPContext(dist.group.WORLD), partition)
        x = partition.split(clip_of(case)[0], rank, 1).reshape(2, case.counts[rank] * TOKENS, block.config.dim)
        keywords = local_keywords(case, partition, rank)
        with torch.no_grad():
            first = block(x, (case.counts[rank], *GRID_2D), **keywords)
        with torch.inference_mode():
            return [first, block(x, (case.counts[rank], *GRID_2D), **keywords).clone()]

    for found in zip(*run_ranks(3, worker), strict=True):
        assert error(torch.cat(found, 1), on_one_process(case).y) < 1e-10


def test_gradient_norm_of_sixteen_layers_in_16_bits_on_two_ranks_is_within_one_percent() -> None:
    """FC-A11: against fp32 on one process, with the same bf16 numbers in the weights."""
    torch.manual_seed(2)
    stack, frames = nn.ModuleList(BidirectionalGDN(dim=32, heads=2) for _ in range(16)).bfloat16(), 7
    x = torch.randn(1, frames * TOKENS, 32).bfloat16()

    def backward(layers: nn.ModuleList, x: Tensor, frames: int, dtype: torch.dtype) -> nn.ModuleList:
        x = x.to(dtype)
        for layer in layers.to(dtype):
            x = x + layer(nn.functional.layer_norm(x, (32,)), (frames, *GRID_2D))
        (x.float().square().sum() / (7 * TOKENS * 32)).backward()
        return layers

    def norm_of(layers: nn.ModuleList) -> float:
        return torch.stack([p.grad.float().norm() for p in layers.parameters()]).norm().item()

    def worker(rank: int) -> float:
        context, partition = CPContext(dist.group.WORLD), FramePartition((4, 3))
        layers = apply_context_parallel(copy.deepcopy(stack), context, partition)
        local = partition.split(x.reshape(1, frames, -1), rank, 1).reshape(1, -1, 32)
        backward(layers, local, partition.counts[rank], torch.bfloat16)
        all_reduce_gradients(layers, context)
        return norm_of(layers)

    whole = norm_of(backward(copy.deepcopy(stack), x, frames, torch.float32))
    assert run_ranks(2, worker) == pytest.approx([whole] * 2, rel=0.01)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(
    use_reentrant: bool, one_process: tuple[float, dict[str, Tensor]]
) -> None:
    """FC-A10, FC-D14: recomputation repeats the exchanges, in the same order on every rank."""
    counts = (3, 1, 3)

    def worker(rank: int) -> dict[str, Tensor]:
        context, partition = CPContext(dist.group.WORLD), FramePartition(counts)
        model = apply_context_parallel(denoiser(), context, partition)
        grid = (counts[rank], *GRID_2D)
        x = model.enter(partition.split(sample(1), rank, 1).reshape(1, -1, C))
        for block in model.blocks:
            x = x + checkpoint(block, x, grid, use_reentrant=use_reentrant)
        (model.leave(x).square().sum() / sample(1).numel()).backward()
        all_reduce_gradients(model, context)
        return gradients_of(model)

    for found in run_ranks(3, worker):
        assert_gradients_agree(found, one_process[1])


def test_a_copy_of_a_model_runs_on_the_same_ranks() -> None:
    """An average of weights is usually a deep copy, which must not silently see its own frames alone."""
    case = Case(BidirectionalGDN, (3, 4))

    def worker(rank: int) -> Tensor:
        partition = FramePartition(case.counts)
        block = copy.deepcopy(apply_context_parallel(make(case), CPContext(dist.group.WORLD), partition))
        x = partition.split(clip_of(case)[0], rank, 1).reshape(2, -1, C)
        return block(x, (case.counts[rank], *GRID_2D)).detach()

    assert error(torch.cat(run_ranks(2, worker), 1), on_one_process(case).y) < 1e-10
