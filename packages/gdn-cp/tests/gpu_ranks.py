"""Ranks that share one GPU: a worker that can be spawned, and what it is held to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gdn_cp import CPContext, FramePartition, count_exchanges, cp_frame_gdn, simulate
from gdn_kernels import RotaryTables, frame_gdn, rotary_tables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU, to try this file itself


class Share(NamedTuple):
    """The shapes of a clip, its dtype, who holds which frames, and how summaries travel."""

    counts: tuple[int, ...]
    spatial: int
    heads: int
    width: int
    dtype: torch.dtype
    schedule: str = "all_gather"

    @property
    def partition(self) -> FramePartition:
        return FramePartition(self.counts)


def draw(share: Share) -> dict[str, Tensor]:
    """Return the leaves of the whole clip on the GPU: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    frames, heads, width = share.partition.total, share.heads, share.width
    tokens = frames * share.spatial

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    leaves = {
        "qkv": normal(1, tokens, 3, heads, width).to(share.dtype),
        "beta": normal(1, heads, frames, share.spatial).sigmoid(),
        "decay": (normal(1, heads, frames) + 3).sigmoid(),
        "q_norm_weight": 1 + 0.2 * normal(heads * width),
        "k_norm_weight": 1 + 0.2 * normal(heads * width),
    }
    return {name: x.to(DEVICE).requires_grad_() for name, x in leaves.items()}


def upstream(share: Share) -> Tensor:
    """Return the gradient that arrives at the output of the whole clip."""
    shape = (1, share.partition.total * share.spatial, share.heads, share.width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@functools.lru_cache(maxsize=8)
def tables_of(frames: int, spatial: int, width: int) -> RotaryTables:
    """Return the tables of the whole clip; a model makes them once, too."""
    return rotary_tables((frames, spatial, 1), width, device=DEVICE)


def arguments(share: Share, leaves: dict[str, Tensor], span: range) -> dict[str, Any]:
    """Return the arguments of the operation on the frames of a span, as views of the leaves."""
    tokens = slice(span.start * share.spatial, span.stop * share.spatial)
    frames = slice(span.start, span.stop)
    tables = tables_of(share.partition.total, share.spatial, share.width)
    return {
        "qkv": leaves["qkv"][:, tokens], "beta": leaves["beta"][:, :, frames], "decay": leaves["decay"][:, :, frames],
        "q_norm_weight": leaves["q_norm_weight"], "k_norm_weight": leaves["k_norm_weight"],
        "rope": RotaryTables(*(x[tokens] for x in tables)), "k_scale": (share.width * share.spatial) ** -0.5,
        "direction": "bidirectional",
    }  # fmt: skip


def run(share: Share, leaves: dict[str, Tensor], span: range, context: CPContext | None, impl: str) -> Tensor:
    """Run the operation on the frames of a span, over ranks or here."""
    given = arguments(share, leaves, span)
    if context is None:
        return frame_gdn(impl=impl, **given).output
    return cp_frame_gdn(context=context, partition=share.partition, impl=impl, **given).output


def simulated(share: Share, leaves: dict[str, Tensor]) -> list[Tensor]:
    """Run the operation on every rank of the share, here."""
    shards = [arguments(share, leaves, share.partition.span(rank)) for rank in range(share.partition.size)]
    return [result.output for result in simulate.frame_gdn(shards, share.partition, schedule=share.schedule)]


def step(share: Share, span: range, context: CPContext | None, impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the output of a span and the gradients of the leaves: of the whole clip, zero outside the span."""
    leaves = {
        name: x.detach().to(dtype if x.dtype == share.dtype else torch.promote_types(dtype, x.dtype)).requires_grad_()
        for name, x in draw(share).items()
    }
    output = run(share, leaves, span, context, impl)
    own = upstream(share)[:, span.start * share.spatial : span.stop * share.spatial]
    output.backward(own.to(output.dtype))
    return {"output": output.detach(), **{name: x.grad for name, x in leaves.items() if x.grad is not None}}


def error(found: Tensor, exact: Tensor) -> float:
    """Return the relative Frobenius error."""
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


def worker(share: Share, rank: int) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Run one rank; return its errors against fp64, those of one device on the same parts, and its exchanges."""
    span = share.partition.span(rank)
    exact = step(share, range(share.partition.total), None, "torch", torch.float64)
    alone = step(share, range(share.partition.total), None, "triton", share.dtype)
    context = CPContext(dist.group.WORLD, schedule=share.schedule)
    step(share, span, context, "triton", share.dtype)
    with count_exchanges() as exchanges:
        found = step(share, span, context, "triton", share.dtype)
    for name in ("q_norm_weight", "k_norm_weight"):  # shared by the ranks: partial gradients
        dist.all_reduce(found[name])

    def own(name: str, x: Tensor) -> Tensor:
        if name == "output" and x.shape[1] != len(span) * share.spatial:
            return x[:, span.start * share.spatial : span.stop * share.spatial]
        if name == "qkv":
            return x[:, span.start * share.spatial : span.stop * share.spatial]
        return x[:, :, span.start : span.stop] if name in ("beta", "decay") else x

    pairs = [{name: error(own(name, x[name]), own(name, exact[name])) for name in exact} for x in (found, alone)]
    return pairs[0], pairs[1], list(exchanges.labels)


def compiled_worker(share: Share, rank: int) -> dict[str, float]:
    """Run one rank eagerly and as one compiled graph; return how far output and gradients are apart."""
    span, context = share.partition.span(rank), CPContext(dist.group.WORLD, schedule=share.schedule)
    eager = step(share, span, context, "triton", share.dtype)
    leaves = draw(share)

    @torch.compile(fullgraph=True)
    def call(given: dict[str, Any]) -> Tensor:
        return cp_frame_gdn(context=context, partition=share.partition, impl="triton", **given).output

    output = call(arguments(share, leaves, span))
    own = upstream(share)[:, span.start * share.spatial : span.stop * share.spatial]
    output.backward(own.to(output.dtype))
    found = {"output": output.detach(), **{name: x.grad for name, x in leaves.items()}}
    return {name: error(found[name], x) for name, x in eager.items()}


def bound(share: Share) -> functools.partial[tuple[dict[str, float], dict[str, float], Sequence[str]]]:
    """Return the worker of a share: a partial, which can be sent to a spawned process."""
    return functools.partial(worker, share)
