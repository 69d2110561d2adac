"""Who owns which frames or tokens: pure Python, equal on all ranks because it is made from data that all ranks hold."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

_P = TypeVar("_P", bound="Partition")


class HaloPiece(NamedTuple):
    """Frames (or tokens) ``span`` of the whole, held by rank ``owner``."""

    owner: int
    span: range


@dataclasses.dataclass(frozen=True)
class Partition:
    """A contiguous run of frames or tokens on each rank; rank order is time order. See the two kinds of it.

    Attributes:
        counts: units of each rank, >= 0, at least one of them positive. Shards may be uneven or empty.

    Raises:
        TypeError: ``counts`` is not a sequence of ints.
        ValueError: A negative count, or nothing at all.
    """

    unit: ClassVar[str]
    letter: ClassVar[str]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = self.counts
        if not isinstance(counts, list | tuple) or not all(
            isinstance(n, int) and not isinstance(n, bool) for n in counts
        ):
            raise TypeError(f"counts must be a tuple of ints, got {counts!r}")
        object.__setattr__(self, "counts", tuple(counts))
        if any(n < 0 for n in counts) or sum(counts) < 1:
            raise ValueError(f"counts must be >= 0 with at least one {self.unit} in all, got {tuple(counts)}")

    @classmethod
    def even(cls: type[_P], total: int, size: int) -> _P:
        """Give the first ``total mod size`` ranks one more; with ``size > total`` the last ranks are empty."""
        _require_size(size)
        each, more = divmod(total, size)
        return cls(tuple(each + (rank < more) for rank in range(size)))

    @classmethod
    def aligned(cls: type[_P], total: int, size: int, multiple: int) -> _P:
        """Cut only at multiples of ``multiple``, as evenly as that allows."""
        _require_size(size)
        if multiple < 1:
            raise ValueError(f"multiple must be >= 1, got {multiple}")
        return cls.at_chunks(total, size, tuple(range(0, total, multiple)))

    @classmethod
    def at_chunks(cls: type[_P], total: int, size: int, starts: Sequence[int]) -> _P:
        """Cut only at chunk starts, each cut at the start nearest to where an even cut would be."""
        _require_size(size)
        allowed = sorted({0, *starts, total})
        if allowed[0] < 0 or allowed[-1] > total:
            raise ValueError(f"starts must lie in 0 ... {cls.letter} = {total}, got {tuple(starts)}")
        cuts = [0]
        for rank in range(1, size):
            ideal = total * rank / size
            cuts.append(max(cuts[-1], min(allowed, key=lambda start: (abs(start - ideal), start))))
        cuts.append(total)
        return cls(tuple(later - earlier for earlier, later in itertools.pairwise(cuts)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    @property
    def total(self) -> int:
        """Frames of the clip, or tokens of the stream."""
        return sum(self.counts)

    @property
    def starts(self) -> tuple[int, ...]:
        """First unit of each rank, and the number of units as last entry."""
        return (0, *itertools.accumulate(self.counts))

    def span(self, rank: int) -> range:
        """Units of a rank, counted over the whole."""
        self._require_rank(rank)
        return range(self.starts[rank], self.starts[rank + 1])

    def owner(self, index: int) -> int:
        """Rank that holds a frame or token."""
        if not 0 <= index < self.total:
            raise ValueError(f"{self.unit} must lie in 0 ... {self.total - 1}, got {index}")
        return bisect.bisect_right(self.starts, index) - 1

    def split(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return the view of a rank's part of a tensor that holds the whole along ``dim``."""
        span = self.span(rank)
        if x.shape[dim] != self.total:
            wanted = f"{self.letter} = {self.total} {self.unit}s along dim {dim}"
            raise ValueError(f"x must have {wanted}, got {x.shape[dim]}")
        return x.narrow(dim, span.start, len(span))

    def local_starts(self, starts: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the interior chunk starts (0 is none) that lie on a rank, counted in the rank's own units."""
        span = self.span(rank)
        return tuple(start - span.start for start in starts if start > 0 and start in span)

    def halo(self, rank: int, left: int, right: int) -> list[HaloPiece]:
        """Return who holds the ``left`` units before and ``right`` units after a rank's own, in time order.

        What lies outside the whole is left out. A halo may name several owners; an empty rank has none.
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


@dataclasses.dataclass(frozen=True)
class FramePartition(Partition):
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

    unit: ClassVar[str] = "frame"
    letter: ClassVar[str] = "F"


def _require_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size must be >= 1, got {size}")
