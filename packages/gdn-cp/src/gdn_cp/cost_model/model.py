"""The model: pure functions of numbers that all ranks hold, so that all ranks choose alike."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

SCHEDULES = ("all_gather", "chain", "doubling")
MAX_BLOCKS = 8
_GAIN = 0.7  # of all_gather's time: one symmetric collective is the easiest to overlap and to debug


@dataclasses.dataclass(frozen=True)
class Link:
    """What one rank's messages meet on their way, and what is done with them on arrival.

    Attributes:
        name: for tables.
        latency: microseconds per message, whatever its size.
        bandwidth: GB/s to and from a rank, each.
        fold: microseconds per rank to apply the maps of a gather, which are all there, to the states of both streams.
        compose: microseconds to compose a rank's maps with those that arrive, in both directions.
        advance: microseconds to take the states that arrive through a rank's maps, in both directions.

    Raises:
        ValueError: A time is negative, or the bandwidth is not positive.
    """

    name: str
    latency: float
    bandwidth: float
    fold: float = 4.0
    compose: float = 8.0
    advance: float = 4.0

    def __post_init__(self) -> None:
        for field in ("latency", "fold", "compose", "advance"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} must be a finite number >= 0, got {getattr(self, field)}")
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth must be a finite number > 0, got {self.bandwidth}")

    def transfer(self, size: float) -> float:
        """Return the microseconds that ``size`` bytes take, without latency."""
        return 1e-3 * size / self.bandwidth


# Assumptions, not measurements: GPUs of one host; one adapter of 400 Gb/s per GPU; one of 100 Gb/s through TCP.
NVLINK = Link("nvlink", 15.0, 300.0)
INFINIBAND = Link("infiniband", 25.0, 45.0)
ETHERNET = Link("ethernet", 60.0, 10.0)
LINKS = {link.name: link for link in (NVLINK, INFINIBAND, ETHERNET)}


class Choice(NamedTuple):
    """A schedule, and in how many parts the chain sends its messages (1 for the others)."""

    schedule: str
    blocks: int


def as_link(link: Link | str) -> Link:
    """Return the link, or the assumed one of this name.

    Raises:
        ValueError: An unknown name.
        TypeError: Neither a name nor a `Link`.
    """
    if isinstance(link, Link):
        return link
    if not isinstance(link, str):
        raise TypeError(f"link must be a Link or the name of one, got {type(link).__name__}")
    if link not in LINKS:
        raise ValueError(f"link must be a Link or one of {', '.join(map(repr, LINKS))}, got {link!r}")
    return LINKS[link]


def message_bytes(width: int, heads: int, *, batch: int = 1, streams: int = 2, itemsize: int = 4) -> tuple[int, int]:
    """Return the bytes of a rank's transitions, and of the states of one direction.

    Example:
        >>> message_bytes(112, 20)
        (2007040, 1012480)
    """
    square = batch * heads * width * width * itemsize
    return streams * square, square + (batch * heads * width * itemsize if streams > 1 else 0)


def chain_blocks(size: int, state_bytes: float, link: Link) -> int:
    """Return the number of parts, 1 to 8, in which a chain is fastest."""
    if size <= 2:
        return 1
    work = link.transfer(state_bytes) + link.advance
    best = math.sqrt((size - 2) * work / link.latency) if link.latency > 0 else math.inf
    return round(min(max(best, 1), MAX_BLOCKS))


def predict(
    schedule: str,
    size: int,
    transition_bytes: float,
    state_bytes: float,
    link: Link,
    *,
    directions: int = 2,
    blocks: int | None = None,
    backward: bool = False,
    save_transitions: bool = True,
) -> float:
    """Return the microseconds of one pass's exchange, folds and compositions included.

    Args:
        schedule: ``"all_gather"``, ``"chain"`` or ``"doubling"``.
        size: number of ranks P.
        transition_bytes: of one rank, as of `message_bytes`.
        state_bytes: of one rank and direction.
        link: what the messages travel on; the two directions go opposite ways on it at the same time.
        directions: 1 or 2; only all_gather sends both in one message.
        blocks: parts of the chain; None takes `chain_blocks`.
        backward: of the backward pass. It takes as long on chain and doubling, which composes maps again; a gather
            sends no transitions if the forward pass kept them.
        save_transitions: it did, as `CPContext.save_transitions` says.

    Raises:
        ValueError: An unknown schedule.

    Example:
        >>> round(predict("doubling", 8, *message_bytes(112, 20), NVLINK))
        99
        >>> [round(predict("all_gather", 8, *message_bytes(112, 20), NVLINK, backward=x)) for x in (False, True)]
        [137, 90]
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}")
    if size == 1:
        return 0.0
    if schedule == "all_gather":
        again = 0 if backward and save_transitions else transition_bytes
        received = (size - 1) * (again + directions * state_bytes)
        return link.latency + link.transfer(received) + (size - 1) * link.fold
    if schedule == "chain":
        parts = chain_blocks(size, state_bytes, link) if blocks is None else blocks
        return (size - 2 + parts) * (link.latency + (link.transfer(state_bytes) + link.advance) / parts)
    rounds = (size - 1).bit_length()
    return rounds * (link.latency + link.transfer(transition_bytes + state_bytes) + link.compose)


def choose_schedule(
    size: int, transition_bytes: float, state_bytes: float, link: Link, *, directions: int = 2, has_final: bool = False
) -> str:
    """Return all_gather, or another schedule that takes less than 0.7 of its time; all_gather with a final state.

    Example:
        >>> choose_schedule(8, *message_bytes(112, 20), NVLINK), choose_schedule(8, *message_bytes(112, 20), INFINIBAND)
        ('all_gather', 'doubling')
    """
    if has_final or size == 1:
        return "all_gather"
    times = {
        name: predict(name, size, transition_bytes, state_bytes, link, directions=directions) for name in SCHEDULES
    }
    fastest = min(SCHEDULES, key=times.__getitem__)
    return fastest if times[fastest] < _GAIN * times["all_gather"] else "all_gather"


def resolve_schedule(
    schedule: str,
    size: int,
    transition_bytes: float,
    state_bytes: float,
    link: Link,
    *,
    directions: int = 2,
    has_final: bool = False,
) -> Choice:
    """Return what a call of ``schedule``, perhaps ``"auto"``, does.

    Raises:
        ValueError: An unknown schedule.
        NotImplementedError: Chain or doubling with a final state, which only all_gather brings to every rank.
    """
    if schedule not in ("auto", *SCHEDULES):
        names = ", ".join(map(repr, ("auto", *SCHEDULES)))
        raise ValueError(f"schedule must be one of {names}, got {schedule!r}")
    if schedule == "auto":
        schedule = choose_schedule(
            size, transition_bytes, state_bytes, link, directions=directions, has_final=has_final
        )
    if has_final and schedule != "all_gather":
        raise NotImplementedError(
            f"schedule={schedule!r} does not bring the final state to every rank; use 'all_gather' or 'auto'"
        )
    return Choice(schedule, chain_blocks(size, state_bytes, link) if schedule == "chain" else 1)
