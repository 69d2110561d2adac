"""Who owns which tokens, and which pieces of packed sequences a rank holds.

The stream of T tokens is cut without regard to sequences. A *fragment* is a sequence's piece on one rank. Only a rank's
first fragment can continue one of an earlier rank, only its last can go on on a later rank.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gdn_cp.handshake import digest
from gdn_cp.partition import Partition


@dataclasses.dataclass(frozen=True, eq=False)
class PackedSequenceCPMetadata:
    """The packed sequences of one rank. Made by `TokenPartition.packed` or `build_packed_sequence_cp_metadata`.

    Attributes:
        local_seq_idx: ``[1, T]`` int32, the sequence of each local token.
        local_cu_seqlens: ``[fragments + 1]`` int32, first token of each local fragment, and the number of tokens.
        preceding_rank_start: the rank that holds the first token of this rank's first sequence.
        following_rank_stop: one more than the rank that holds the last token of this rank's last sequence.
        fragment_sequences: the sequence of each fragment, counted over the whole stream.
        any_crossing: some sequence lies on more than one rank: the same on all ranks. Nothing is exchanged if not.
        local_bounds: ``local_cu_seqlens`` on the host. Without it, it is read from the device when needed.
        plan: a hash of cuts and sequences, compared over ranks.
        rank: whose metadata these are; None is not known, and not compared with the rank that uses them.
        size: number of ranks; known if ``rank`` is.
    """

    local_seq_idx: Tensor
    local_cu_seqlens: Tensor
    preceding_rank_start: int
    following_rank_stop: int
    fragment_sequences: tuple[int, ...] = ()
    any_crossing: bool = True
    local_bounds: tuple[int, ...] = ()
    plan: str = ""
    rank: int | None = None
    size: int | None = None

    @property
    def bounds(self) -> tuple[int, ...]:
        """``local_cu_seqlens`` as ints; waits for the device if this was not made from host integers."""
        return self.local_bounds or tuple(self.local_cu_seqlens.tolist())


@dataclasses.dataclass(frozen=True)
class TokenPartition(Partition):
    """Contiguous tokens of one stream on each rank; rank order is time order.

    Attributes:
        counts: tokens of each rank, >= 0, at least one of them positive. Shards may be uneven or empty.

    Raises:
        TypeError: ``counts`` is not a sequence of ints.
        ValueError: A negative count, or no token at all.

    Example:
        >>> partition = TokenPartition.even(16, 4)
        >>> metadata = partition.packed((0, 5, 9, 16), 2, "cpu")
        >>> metadata.local_cu_seqlens.tolist(), metadata.preceding_rank_start, metadata.following_rank_stop
        ([0, 1, 4], 1, 4)
    """

    unit: ClassVar[str] = "token"
    letter: ClassVar[str] = "T"

    def packed(
        self, cu_seqlens: Sequence[int], rank: int, device: torch.device | str | int
    ) -> PackedSequenceCPMetadata:
        """Return what a rank holds of packed sequences; host integers in, so that no device is waited for.

        Args:
            cu_seqlens: first token of each sequence over the **whole** stream, and T. Empty sequences are allowed.
            rank: whose part.
            device: of the tensors made.

        Raises:
            TypeError: ``cu_seqlens`` is not a sequence of ints (a tensor would have to be read from its device).
            ValueError: ``cu_seqlens`` does not start at 0, decreases, or does not end at T.

        Compilation: runs outside the graph, which ``torch.compile`` breaks before and after it.
        """
        if torch.compiler.is_compiling():
            outside = torch.compiler.disable(TokenPartition.packed)  # type: ignore[no-untyped-call]
            return outside(self, cu_seqlens, rank, device)  # type: ignore[no-any-return]
        if not isinstance(cu_seqlens, list | tuple) or not all(
            isinstance(n, int) and not isinstance(n, bool) for n in cu_seqlens
        ):
            raise TypeError(f"cu_seqlens must be a tuple of ints, got {type(cu_seqlens).__name__}")
        steps = list(itertools.pairwise(cu_seqlens))
        if not steps or cu_seqlens[0] != 0 or cu_seqlens[-1] != self.total or any(b < a for a, b in steps):
            raise ValueError(
                f"cu_seqlens must start at 0, not decrease and end at T = {self.total}, got {tuple(cu_seqlens)}"
            )
        sequences = [number for number, (start, stop) in enumerate(steps) if stop > start]
        return _metadata(self, [cu_seqlens[i] for i in sequences], sequences, rank, None, torch.device(device))


def build_packed_sequence_cp_metadata(global_seq_idx: Tensor, cp_rank: int, cp_size: int) -> PackedSequenceCPMetadata:
    """Return what a rank of equal shards holds of packed sequences, from a sequence id per token.

    Args:
        global_seq_idx: ``[1, T]`` int32, not decreasing, of the whole stream.
        cp_rank: whose part.
        cp_size: number of ranks; T is a multiple of it.

    Raises:
        ValueError: Another shape or dtype, decreasing ids, no token, T not a multiple of ``cp_size``, no such rank.

    Cost: waits for the device twice. `TokenPartition.packed` does not, and takes any cut.

    Example:
        >>> ids = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)
        >>> build_packed_sequence_cp_metadata(ids, 1, 2).preceding_rank_start
        1
    """
    if global_seq_idx.ndim != 2 or global_seq_idx.shape[0] != 1:
        raise ValueError(f"global_seq_idx must have shape [1, T], got {list(global_seq_idx.shape)}")
    if global_seq_idx.dtype != torch.int32:
        dtype = str(global_seq_idx.dtype).removeprefix("torch.")
        raise ValueError(f"global_seq_idx must have dtype int32, got {dtype}")
    tokens = global_seq_idx.shape[1]
    if tokens == 0:
        raise ValueError("global_seq_idx must hold at least one token")
    if cp_size < 1 or tokens % cp_size:
        raise ValueError(f"global_seq_idx must hold a multiple of cp_size = {cp_size} tokens, got T = {tokens}")
    ids = global_seq_idx[0]
    later = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
    starts = torch.cat([later.new_zeros(1), later])
    found_starts, found_ids = torch.stack([starts, ids[starts].to(starts.dtype)]).tolist()
    if any(b < a for a, b in itertools.pairwise(found_ids)):
        raise ValueError(f"global_seq_idx must not decrease, got sequences {found_ids}")
    partition = TokenPartition.even(tokens, cp_size)
    return _metadata(partition, found_starts, found_ids, cp_rank, global_seq_idx, global_seq_idx.device)


def _metadata(
    partition: TokenPartition,
    starts: Sequence[int],
    sequences: Sequence[int],
    rank: int,
    global_seq_idx: Tensor | None,
    device: torch.device,
) -> PackedSequenceCPMetadata:
    """Return the metadata of a rank from the first token and the number of every sequence that is not empty."""
    span, total, beginnings = partition.span(rank), partition.total, set(starts)
    crossing = any(0 < cut < total and cut not in beginnings for cut in partition.starts)
    bounds, held, preceding, following = [0], [], rank, rank + 1
    if span:
        first, last = bisect.bisect_right(starts, span.start) - 1, bisect.bisect_right(starts, span.stop - 1) - 1
        ends = (*starts[1:], total)
        held = list(sequences[first : last + 1])
        bounds += [min(ends[i], span.stop) - span.start for i in range(first, last + 1)]
        preceding, following = partition.owner(starts[first]), partition.owner(ends[last] - 1) + 1
    if global_seq_idx is None:
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        ids = torch.repeat_interleave(torch.tensor(held, dtype=torch.int32), torch.tensor(lengths, dtype=torch.long))
        local_seq_idx = _to_device(ids[None], device)
    else:
        local_seq_idx = global_seq_idx[:, span.start : span.stop]
    return PackedSequenceCPMetadata(
        local_seq_idx=local_seq_idx,
        local_cu_seqlens=_to_device(torch.tensor(bounds, dtype=torch.int32), device),
        preceding_rank_start=preceding,
        following_rank_stop=following,
        fragment_sequences=tuple(held),
        any_crossing=crossing,
        local_bounds=tuple(bounds),
        plan=digest((partition.counts, tuple(starts), tuple(sequences))),
        rank=rank,
        size=partition.size,
    )


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting: only from page-locked memory is a copy to a GPU asynchronous."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)
