"""Contexts by name."""

import gc

import pytest

from gdn_cp import CPContext
from gdn_cp.handles import context_of


def test_a_handle_finds_its_context_while_it_lives() -> None:
    context, other = CPContext.single(), CPContext.single()
    assert context_of(context.handle) is context
    assert context.handle != other.handle != context.replace(tag="x").handle
    gone = other.handle
    del other
    gc.collect()
    with pytest.raises(RuntimeError, match=f"{gone} is gone: keep the CPContext"):
        context_of(gone)


def test_a_held_context_stays() -> None:
    handle = CPContext.single().handle
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone"):
        context_of(handle)
    context = (CPContext.single(),)
    handle = context[0].handle
    context_of(handle, hold=True)
    del context
    gc.collect()
    assert context_of(handle).handle == handle
