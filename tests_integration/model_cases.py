"""Cases that run a block on the ranks of a group and on one process, and compare everything that comes out.

The process that starts the ranks computes what one process gives; a rank returns its part; the parts are put together
and compared here. A gradient of the input belongs to its rank, one of a parameter is the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gdn_cp import CPContext, FramePartition
from gdn_models import BidirectionalGDN, ChunkCausalGDN, FrameGDN, apply_context_parallel

CLASSES: Sequence[type[nn.Module]] = (FrameGDN, BidirectionalGDN, ChunkCausalGDN)
FRAMES, ROWS, COLUMNS = 7, 2, 1
SPATIAL = ROWS * COLUMNS
MASK = torch.tensor([[1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1, 0]]).bool()  # frames 2, 3 and 5 start chunks below


class Case(NamedTuple):
    """One call of one block; ``counts`` are the frames of each rank."""

    cls: type[nn.Module]
    counts: tuple[int, ...]
    starts: tuple[int, ...] | None = None
    mask: Tensor | None = None
    options: Mapping[str, Any] = {}
    spatial: tuple[int, int] = (ROWS, COLUMNS)
    batch: int = 2
    dtype: torch.dtype = torch.float64
    loss_ranks: tuple[int, ...] | None = None  # None: all
    sees: bool = False  # a camera

    def __str__(self) -> str:
        """Name the case in a failure."""
        masked = "masked" if self.mask is not None else "unmasked"
        return f"{self.cls.__name__} on {self.counts}, starts {self.starts}, {masked}, {dict(self.options)}"


class Outcome(NamedTuple):
    """Output and gradient of the input, ``[B, N, C]``, and the gradient of every parameter."""

    y: Tensor
    dx: Tensor
    gradients: dict[str, Tensor]


def randomized(model: nn.Module, seed: int = 3) -> nn.Module:
    """Make the weights of a model random, the same on every process."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("beta_proj.bias", "dt_bias")):
                parameter.zero_()  # gates around one half: the past fades slowly enough to cross ranks
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype), alpha=0.3)
    return model


def make(case: Case) -> nn.Module:
    """Return the block of a case with random weights, the same on every process."""
    torch.manual_seed(3)
    return randomized(case.cls(**{"dim": 12, "heads": 3, "qkv_bias": True, **case.options})).to(case.dtype)


def clip_of(case: Case) -> tuple[Tensor, Tensor]:
    """Return input and upstream gradient of the whole clip; the gradient is zero on ranks without a loss."""
    generator = torch.Generator().manual_seed(5)
    tokens = case.spatial[0] * case.spatial[1]
    width = case.options.get("dim", 12)
    shape = (case.batch, sum(case.counts), tokens * width)
    x, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for _ in range(2))
    if case.loss_ranks is not None:
        starts = FramePartition(case.counts).starts
        for rank in range(len(case.counts)):
            if rank not in case.loss_ranks:
                upstream[:, starts[rank] : starts[rank + 1]] = 0
    return x, upstream


def camera_clip(batch: int, frames: int, seed: int = 6) -> Tensor:
    """Return cameras ``[B, F, 20]`` in fp64: rotations about one axis, moving centres, changing lenses."""
    generator = torch.Generator().manual_seed(seed)
    angle, *rest = torch.randn(8, batch, frames, generator=generator, dtype=torch.float64)
    one, zero = torch.ones_like(angle), torch.zeros_like(angle)
    cos, sin = angle.cos(), angle.sin()
    pose = (cos, zero, sin, rest[0], zero, one, zero, rest[1], -sin, zero, cos, rest[2], zero, zero, zero, one)
    lens = (1 + rest[3].abs(), 1 + rest[4].abs(), rest[5], rest[6])
    return torch.stack((*pose, *lens), -1)


def camera_of(case: Case) -> Tensor:
    """Return the cameras of the whole clip of a case."""
    return camera_clip(case.batch, sum(case.counts)).to(case.dtype)


def run(case: Case, block: nn.Module, first: int, frames: int, partition: FramePartition | None) -> Outcome:
    """Run frames ``first ... first + frames - 1`` of the case, forward and backward."""
    x, upstream = (y[:, first : first + frames] for y in clip_of(case))
    tokens = frames * case.spatial[0] * case.spatial[1]
    x = x.reshape(case.batch, tokens, block.config.dim).detach().requires_grad_()
    keywords: dict[str, Any] = {} if case.starts is None else {"chunk_starts": case.starts}
    if case.mask is not None:
        keywords["frame_valid"] = case.mask[: case.batch, first : first + frames]
    if partition is not None:
        keywords["partition"] = partition
    if case.sees:
        keywords["camera"] = camera_of(case)[:, first : first + frames]
    y = block(x, (frames, *case.spatial), **keywords)
    y.backward(upstream.reshape(y.shape))
    assert x.grad is not None
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return Outcome(y.detach(), x.grad, gradients)


def on_one_process(case: Case) -> Outcome:
    """Run the whole clip without a context."""
    return run(case, make(case), 0, sum(case.counts), None)


def on_this_rank(case: Case, context: CPContext) -> Outcome:
    """Run the part of this rank."""
    partition = FramePartition(case.counts)
    block = apply_context_parallel(make(case), context)
    return run(case, block, partition.starts[context.rank], case.counts[context.rank], partition)


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference over the largest entry expected; inf where one of them is not finite."""
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    scale = expected.double().abs().max().clamp(min=1e-300)
    return float(torch.nan_to_num((found.double() - expected.double()).abs().max() / scale, torch.inf, torch.inf))


def assert_outcomes_agree(
    case: Case, parts: Sequence[Outcome], whole: Outcome, tolerance: float = 1e-10, *, gradients: float | None = None
) -> None:
    """Compare the ranks with one process: output and ``dx`` rank by rank, gradients summed over the ranks."""
    gradients = tolerance if gradients is None else gradients
    partition, tokens = FramePartition(case.counts), case.spatial[0] * case.spatial[1]
    found: list[tuple[str, Tensor, Tensor, float]] = []
    for rank, part in enumerate(parts):
        span = slice(partition.starts[rank] * tokens, partition.starts[rank + 1] * tokens)
        found.append((f"output of rank {rank}", part.y, whole.y[:, span], tolerance))
        found.append((f"dx of rank {rank}", part.dx, whole.dx[:, span], gradients))
        assert part.gradients.keys() == whole.gradients.keys(), f"{case}: rank {rank} lacks gradients"
    for name, expected in whole.gradients.items():
        total = torch.stack([part.gradients[name].double() for part in parts]).sum(0)
        found.append((f"gradient of {name}", total, expected, gradients))
    for name, value, expected, bound in found:
        assert error(value, expected) <= bound, f"{case}: {name}: relative error {error(value, expected):.3e} > {bound}"
