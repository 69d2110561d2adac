"""One padded grid of chunks for any set of token sequences: who is where, and the way in and out.

A **fragment** is a run of tokens with a state of its own: a batch row, a packed sequence, or the piece of a sequence
that one rank holds. Every fragment is cut into chunks of C tokens, its last one padded; padding writes nothing, forgets
nothing and reads nothing, and wastes less than C tokens per fragment.

The chunks of all fragments lie on one axis, X, in the order in which the scan needs them: the first chunk of every
fragment, then every second chunk, and so on, with the fragments of most chunks first. So the chunks of one step of the
scan are a slice of X and belong to the first few fragments: no gather, no mask and no padding inside the scan.

Letters: N fragments, E tokens of the stream (B*T), X chunks, C tokens of a chunk, R rows of a token, n = C*R.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ScanPlan:
    """In which order the chunks of X are scanned; made by `scan_plan`.

    Attributes:
        counts: chunks of each fragment; 0 for an empty one, whose state passes through.
        steps: for each step, its chunks as a slice of X. A step of a chunks belongs to the first a fragments of
            ``order``; a never grows.
        order: ``[N]`` int64, fragments by falling number of chunks.
        position: ``[N]`` int64, the inverse: where in ``order`` each fragment is.
    """

    counts: tuple[int, ...]
    steps: tuple[slice, ...]
    order: Tensor
    position: Tensor

    @property
    def chunks(self) -> int:
        """X, the number of chunks of all fragments together."""
        return sum(self.counts)

    def select(self, fragments: Sequence[int]) -> tuple[ScanPlan, Tensor]:
        """Return the plan of these fragments alone, ``N'`` of them, and where in X its chunks are, ``[X']`` int64.

        ``x.index_select(0, chunks)`` makes of chunks of this plan the chunks of that one.
        """
        plan = scan_plan([self.counts[fragment] for fragment in fragments], self.order.device)
        first = torch.tensor([part.start for part in self.steps], dtype=torch.int64)
        inner, step, place = _scan_order(plan.counts)
        outer = _scan_order(self.counts)[0]
        position = torch.empty_like(outer).scatter_(0, outer, torch.arange(len(outer)))
        ours = torch.tensor(fragments, dtype=torch.int64)[inner[place]]
        return plan, (first[step] + position[ours]).to(self.order.device, non_blocking=True)


@dataclasses.dataclass(frozen=True)
class ChunkGrid:
    """Which token is in which slot of the grid; made by `chunk_grid`.

    Attributes:
        lengths: tokens of each fragment; the fragments follow one another in the stream.
        chunk_tokens: C.
        plan: the order of the chunks.
        tokens: ``[X*C]`` int64, the token of the stream in each slot; 0 where there is none.
        padding: ``[X*C]`` bool, the slots without a token; None if every slot has one.
        slots: ``[E]`` int64, the slot of each token.
    """

    lengths: tuple[int, ...]
    chunk_tokens: int
    plan: ScanPlan
    tokens: Tensor
    padding: Tensor | None
    slots: Tensor

    def to_chunks(self, x: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        """Return a stream ``[B, T*R, heads, D]``, R = ``rows``, as contiguous ``[X, heads, n, D]``; padding is 0."""
        heads, width = x.shape[2:]
        by_slot = x.reshape(-1, rows, heads, width).index_select(0, self.tokens)
        if self.padding is not None:
            by_slot = by_slot.masked_fill(self.padding[:, None, None, None], 0.0)
        by_chunk = by_slot.reshape(self.plan.chunks, self.chunk_tokens * rows, heads, width).transpose(1, 2)
        return by_chunk.to(dtype, memory_format=torch.contiguous_format)

    def to_stream(self, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return chunks ``[X, heads, n, D]`` as a contiguous stream of ``shape [B, T*R, heads, D]`` and ``dtype``."""
        heads, rows, width = x.shape[1:]
        by_slot = x.transpose(1, 2).reshape(-1, rows // self.chunk_tokens, heads, width)
        return by_slot.index_select(0, self.slots).to(dtype).reshape(shape)


def chunk_grid(lengths: Sequence[int], chunk_tokens: int, device: torch.device | str = "cpu") -> ChunkGrid:
    """Lay out fragments of ``lengths`` tokens, any of them 0, in chunks of ``chunk_tokens``.

    Computed from host integers; the tables are then copied to ``device``, which is not waited for.
    """
    plan = scan_plan([-(-length // chunk_tokens) for length in lengths], device)
    order, step, place = _scan_order(plan.counts)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64)
    fragment = order[place]
    first, stop = starts[fragment] + step * chunk_tokens, starts[fragment + 1]
    tokens = (first[:, None] + torch.arange(chunk_tokens)).flatten()
    padding = tokens >= stop.repeat_interleave(chunk_tokens)
    real = (~padding).nonzero().flatten()
    slots = torch.empty(sum(lengths), dtype=torch.int64).scatter_(0, tokens[real], real)
    return ChunkGrid(
        tuple(lengths),
        chunk_tokens,
        plan,
        tokens.masked_fill(padding, 0).to(device, non_blocking=True),
        padding.to(device, non_blocking=True) if len(real) < len(tokens) else None,
        slots.to(device, non_blocking=True),
    )


def scan_plan(counts: Sequence[int], device: torch.device | str = "cpu") -> ScanPlan:
    """Return the plan of fragments with the given numbers of chunks."""
    order, step, _ = _scan_order(counts)
    active = step.bincount(minlength=0).tolist()
    steps = tuple(slice(end - a, end) for a, end in zip(active, itertools.accumulate(active), strict=True))
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return ScanPlan(tuple(counts), steps, order.to(device, non_blocking=True), position.to(device, non_blocking=True))


def _scan_order(counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fragments by falling count, and of every chunk of X its step and the place of its fragment there."""
    chunks = torch.tensor(counts, dtype=torch.int64)
    order = chunks.argsort(descending=True, stable=True)
    step, place = (torch.arange(max(counts, default=0))[:, None] < chunks[order]).nonzero(as_tuple=True)
    return order, step, place
