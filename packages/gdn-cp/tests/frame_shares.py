"""A clip in shares, on the CPU or a GPU: workers that can be spawned, and what they are held to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gdn_cp import CPContext, FramePartition, count_exchanges, cp_frame_gdn, simulate
from gdn_kernels import RotaryTables, frame_gdn, rotary_tables


class Share(NamedTuple):
    """The shapes of a clip, its dtype, who holds which frames, how summaries travel, and where."""

    counts: tuple[int, ...]
    spatial: int
    heads: int
    width: int
    dtype: torch.dtype
    schedule: str = "all_gather"
    device: str = "cuda"

    @property
    def impl(self) -> str:
        return "triton" if self.device == "cuda" else "torch"

    @property
    def partition(self) -> FramePartition:
        return FramePartition(self.counts)


def draw(share: Share) -> dict[str, Tensor]:
    """Return the leaves of the whole clip: the same on every rank."""
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
    return {name: x.to(share.device).requires_grad_() for name, x in leaves.items()}


def upstream(share: Share) -> Tensor:
    """Return the gradient that arrives at the output of the whole clip."""
    shape = (1, share.partition.total * share.spatial, share.heads, share.width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(share.device)


@functools.lru_cache(maxsize=8)
def tables_of(frames: int, spatial: int, width: int, device: str) -> RotaryTables:
    """Return the tables of the whole clip; a model makes them once, too."""
    return rotary_tables((frames, spatial, 1), width, device=torch.device(device))


def arguments(share: Share, leaves: dict[str, Tensor], span: range) -> dict[str, Any]:
    """Return the arguments of the operation on the frames of a span, as views of the leaves."""
    tokens = slice(span.start * share.spatial, span.stop * share.spatial)
    frames = slice(span.start, span.stop)
    tables = tables_of(share.partition.total, share.spatial, share.width, share.device)
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
    found, alone = errors_of(share, (share.schedule,), CPContext(dist.group.WORLD))
    errors, exchanges = found[share.schedule]
    return errors, alone, exchanges


def errors_of(
    share: Share, names: Sequence[str], context: CPContext
) -> tuple[dict[str, tuple[dict[str, float], list[str]]], dict[str, float]]:
    """Run this rank of a context on some schedules; return for each its errors and exchanges, and one device's errors.

    The errors are those of output and gradients against fp64, on this rank's part.
    """
    span = share.partition.span(context.rank)
    exact = step(share, range(share.partition.total), None, "torch", torch.float64)
    alone = step(share, range(share.partition.total), None, share.impl, share.dtype)

    def own(name: str, x: Tensor) -> Tensor:
        if name == "output" and x.shape[1] != len(span) * share.spatial:
            return x[:, span.start * share.spatial : span.stop * share.spatial]
        if name == "qkv":
            return x[:, span.start * share.spatial : span.stop * share.spatial]
        return x[:, :, span.start : span.stop] if name in ("beta", "decay") else x

    def errors(of: dict[str, Tensor]) -> dict[str, float]:
        return {name: error(own(name, of[name]), own(name, exact[name])) for name in exact}

    results = {}
    for name in names:
        scheduled = context.replace(schedule=name)
        step(share, span, scheduled, share.impl, share.dtype)
        with count_exchanges() as exchanges:
            found = step(share, span, scheduled, share.impl, share.dtype)
        for shared in ("q_norm_weight", "k_norm_weight"):  # partial gradients
            dist.all_reduce(found[shared], group=context.process_group)
        results[name] = errors(found), list(exchanges.labels)
    return results, errors(alone)


def compiled_worker(share: Share, rank: int, backend: str = "inductor") -> tuple[dict[str, float], list[str]]:
    """Run one rank eagerly and as one compiled graph; return how far results are apart, and the graph's exchanges."""
    span, context = share.partition.span(rank), CPContext(dist.group.WORLD, schedule=share.schedule)
    own = upstream(share)[:, span.start * share.spatial : span.stop * share.spatial].to(share.dtype)
    given = arguments(share, draw(share), span)

    def call(shard: dict[str, Any]) -> Tensor:
        return cp_frame_gdn(context=context, partition=share.partition, impl=share.impl, **shard).output

    def results(function: Callable[[dict[str, Any]], Tensor]) -> dict[str, Tensor]:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items() if isinstance(x, Tensor)}
        output = function(given | leaves)
        return {"output": output.detach(), **dict(zip(leaves, torch.autograd.grad(output, [*leaves.values()], own)))}

    eager = results(call)
    with count_exchanges() as exchanges:
        found = results(torch.compile(call, fullgraph=True, backend=backend))
    return {name: error(found[name], x) for name, x in eager.items()}, list(exchanges.labels)


def bound(share: Share) -> functools.partial[tuple[dict[str, float], dict[str, float], Sequence[str]]]:
    """Return the worker of a share: a partial, which can be sent to a spawned process."""
    return functools.partial(worker, share)
