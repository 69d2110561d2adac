"""Contexts by name: operators of a graph take tensors, numbers and strings, never objects."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdn_cp.context import CPContext

_numbers = itertools.count()
_contexts: weakref.WeakValueDictionary[str, CPContext] = weakref.WeakValueDictionary()
_held: dict[str, CPContext] = {}


def new_handle(context: CPContext) -> str:
    """Return a name for a context, of this process only, for as long as the context lives."""
    handle = f"context {next(_numbers)}"
    _contexts[handle] = context
    return handle


def context_of(handle: str, *, hold: bool = False) -> CPContext:
    """Return the context of a handle; with ``hold`` it stays: a compiled backward may outlive who made the context.

    Raises:
        RuntimeError: The context is gone.
    """
    context = _contexts.get(handle)
    if context is None:
        raise RuntimeError(f"gdn_cp: {handle} is gone: keep the CPContext for as long as what was compiled with it")
    if hold:
        _held[handle] = context
    return context
