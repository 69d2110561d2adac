"""Activation checkpointing that does not repeat exchanges: what they brought is kept, and handed out again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_local = threading.local()


class ExchangeLog:
    """Results of the exchanges of one checkpointed call, in order; written once, read by every recomputation."""

    def __init__(self) -> None:
        """Start empty."""
        self._results: list[Any] = []
        self._position: int | None = None

    @property
    def replays(self) -> bool:
        """Whether results are handed out rather than taken down."""
        return self._position is not None

    def put(self, result: Any) -> None:
        """Take down the result of the next exchange."""
        self._results.append(result)

    def take(self) -> Any:
        """Hand out the result of the next exchange.

        Raises:
            RuntimeError: The recomputation exchanges more than the call did.
        """
        assert self._position is not None
        if self._position == len(self._results):
            raise RuntimeError("keep_exchanges: the recomputation makes an exchange that the forward did not make")
        self._position += 1
        return self._results[self._position - 1]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Take down exchanges of this thread, from the first one on."""
        self._results.clear()
        with self._active():
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Hand out exchanges to this thread, from the first one on."""
        self._position = 0
        try:
            with self._active():
                yield
        finally:
            self._position = None

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        before, _local.log = current_log(), self
        try:
            yield
        finally:
            _local.log = before


def current_log() -> ExchangeLog | None:
    """Return the log of this thread, or None."""
    log: ExchangeLog | None = getattr(_local, "log", None)
    return log


def keep_exchanges() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Keep what exchanges brought over a checkpoint: the ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.

    The recomputation of a checkpointed block repeats its local work but none of its exchanges, those of summaries and
    of halos: a training step then makes as many as without checkpointing. Without this everything stays right, with
    one exchange more per operation.

    Returns:
        tuple: contexts for the forward and for the recomputation, as ``context_fn`` must.

    Communication: none of its own. Every rank must use it: yes, or none.
    Cost: keeps what arrived, per call of an operation P messages of a pass, until the backward.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpoint(torch.sin, x, use_reentrant=False, context_fn=keep_exchanges).sum().backward()
        >>> x.grad
        tensor([0.5403, 0.5403])
    """
    log = ExchangeLog()
    return log.recording(), _Reusable(log)


class _Reusable(contextlib.AbstractContextManager[None]):
    """A replay that can be entered again: with ``retain_graph`` a call is computed anew in every backward."""

    def __init__(self, log: ExchangeLog) -> None:
        self._log = log
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._log.replaying())
        self._entered[-1].__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)
