"""Who owns which frames: pure Python, equal on all ranks because it is made from data that all ranks hold."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class HaloPiece(NamedTuple):
    """Frames ``frames`` of the clip, held by rank ``owner``."""

    owner: int
    frames: range


@dataclasses.dataclass(frozen=True)
class FramePartition:
    """Contiguous frames of one clip on each rank; rank order is time order.

    Attributes:
        counts: frames of each rank, >= 0, at least one of them positive. Shards may be uneven or empty.

    Raises:
        TypeError: ``counts`` is not a sequence of ints.
        ValueError: A negative count, or no frame at all.

    Example:
        >>> partition = FramePartition.even(121, 2)
        >>> partition.counts, partition.starts, partition.span(1)
        ((61, 60), (0, 61, 121), range(61, 121))
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = self.counts
        if not isinstance(counts, list | tuple) or not all(
            isinstance(n, int) and not isinstance(n, bool) for n in counts
        ):
            raise TypeError(f"counts must be a tuple of ints, got {counts!r}")
        object.__setattr__(self, "counts", tuple(counts))
        if any(n < 0 for n in counts) or sum(counts) < 1:
            raise ValueError(f"counts must be >= 0 with at least one frame in all, got {tuple(counts)}")

    @classmethod
    def even(cls, frames: int, size: int) -> FramePartition:
        """Give the first ``frames mod size`` ranks one frame more; with ``size > frames`` the last ranks are empty."""
        _require_size(size)
        each, more = divmod(frames, size)
        return cls(tuple(each + (rank < more) for rank in range(size)))

    @classmethod
    def aligned(cls, frames: int, size: int, multiple: int) -> FramePartition:
        """Cut only at multiples of ``multiple``, as evenly as that allows."""
        _require_size(size)
        if multiple < 1:
            raise ValueError(f"multiple must be >= 1, got {multiple}")
        return cls.at_chunks(frames, size, tuple(range(0, frames, multiple)))

    @classmethod
    def at_chunks(cls, frames: int, size: int, starts: Sequence[int]) -> FramePartition:
        """Cut only at chunk starts, each cut at the start nearest to where an even cut would be."""
        _require_size(size)
        allowed = sorted({0, *starts, frames})
        if allowed[0] < 0 or allowed[-1] > frames:
            raise ValueError(f"starts must lie in 0 ... F = {frames}, got {tuple(starts)}")
        cuts = [0]
        for rank in range(1, size):
            ideal = frames * rank / size
            cuts.append(max(cuts[-1], min(allowed, key=lambda start: (abs(start - ideal), start))))
        cuts.append(frames)
        return cls(tuple(later - earlier for earlier, later in itertools.pairwise(cuts)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    @property
    def total(self) -> int:
        """Frames of the clip."""
        return sum(self.counts)

    @property
    def starts(self) -> tuple[int, ...]:
        """First frame of each rank, and the number of frames as last entry."""
        return (0, *itertools.accumulate(self.counts))

    def span(self, rank: int) -> range:
        """Frames of a rank, counted over the clip."""
        self._require_rank(rank)
        return range(self.starts[rank], self.starts[rank + 1])

    def owner(self, frame: int) -> int:
        """Rank that holds a frame."""
        if not 0 <= frame < self.total:
            raise ValueError(f"frame must lie in 0 ... {self.total - 1}, got {frame}")
        return bisect.bisect_right(self.starts, frame) - 1

    def split(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return the view of a rank's frames of a tensor that holds the whole clip along ``dim``."""
        span = self.span(rank)
        if x.shape[dim] != self.total:
            raise ValueError(f"x must have F = {self.total} frames along dim {dim}, got {x.shape[dim]}")
        return x.narrow(dim, span.start, len(span))

    def local_starts(self, starts: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the clip's interior chunk starts (0 is none) that lie on a rank, counted in the rank's own frames."""
        span = self.span(rank)
        return tuple(start - span.start for start in starts if start > 0 and start in span)

    def halo(self, rank: int, left: int, right: int) -> list[HaloPiece]:
        """Return who holds the ``left`` frames before and ``right`` frames after a rank's own, in time order.

        Frames outside the clip are left out. A halo may name several owners; an empty rank has none.
        """
        span = self.span(rank)
        if left < 0 or right < 0:
            raise ValueError(f"left and right must be >= 0, got {left} and {right}")
        if not span:
            return []
        sides = (range(max(span.start - left, 0), span.start), range(span.stop, min(span.stop + right, self.total)))
        pieces = []
        for side in sides:
            for owner in range(self.size):
                own = self.span(owner)
                shared = range(max(side.start, own.start), min(side.stop, own.stop))
                if shared:
                    pieces.append(HaloPiece(owner, shared))
        return pieces

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must lie in 0 ... {self.size - 1}, got {rank}")


def _require_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size must be >= 1, got {size}")
