"""Before the first payload of a kind of call, the ranks compare what they are about to do.

One fixed-size descriptor per rank is gathered: what must be equal, and whether the rank's own arguments are in order.
So a mistake on one rank is an error on all of them, and buffers of unequal size, which end a process from inside the
library that sends them, are never sent.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import hashlib
import json
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gdn_cp import collectives
from gdn_cp.context import CPContext

DESCRIPTOR_BYTES = 512
_MESSAGE_BYTES = 256
_DIGEST, _TAG = 12, 24
_RAISED = ("ValueError", "TypeError", "NotImplementedError", "RuntimeError", "OverflowError", "AttributeError",
           "IndexError", "ImportError")  # fmt: skip
_CONTEXT_TERMS = ("grad mode", "validate", "force_backward")
_REMEDY = "give every rank a context with force_backward=True"
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Terms:
    """What one rank brings to a call.

    Attributes:
        wire: (name, value) pairs that decide what is sent: a new combination is compared before its first payload.
        agreed: further pairs that must be equal on all ranks; compared whenever descriptors are.
        needs_grad: some input of this rank requires a gradient.
        grad_mode: gradients are enabled.
        value_names: names of pairs whose disagreement is a ValueError, a wrong shape, and not a misuse of the group.
        joins: this rank will run a backward if another one does. A compiled graph that needs no gradient will not.
    """

    wire: tuple[tuple[str, Any], ...]
    agreed: tuple[tuple[str, Any], ...]
    needs_grad: bool
    grad_mode: bool
    value_names: tuple[str, ...] = ()
    joins: bool = True


class _Backward(enum.Enum):
    """Who runs the backward of a kind of call, as far as the ranks have compared it."""

    NOBODY = enum.auto()  # no rank needed a gradient
    WHO_NEEDS = enum.auto()  # none at first, then all: those that need one now are all ranks or none
    EVERYBODY = enum.auto()  # some needed one before any call in which none did


@dataclasses.dataclass
class _Compared:
    """What the ranks of a group have compared: the same on all of them, or some would compare while others send.

    So this rank's own need of a gradient is no part of the key of a call.
    """

    ops: set[str] = dataclasses.field(default_factory=set)
    calls: dict[Any, _Backward] = dataclasses.field(default_factory=dict)


_compared: weakref.WeakKeyDictionary[Any, _Compared] = weakref.WeakKeyDictionary()


def agree(
    op: str, context: CPContext, device: torch.device | None, make: Callable[[], tuple[Terms, _T]]
) -> tuple[_T, bool]:
    """Run ``make``, compare its terms over the ranks if need be, and return its value and whether a backward will run.

    Args:
        op: name of the operation, the start of every message.
        context: the ranks.
        device: of this rank's tensors, if they have one. The descriptor travels where the group can send it.
        make: checks the arguments and returns the rank's terms and whatever the caller goes on with.

    Raises:
        Exception: ``make`` raised it: of its class on this rank, and of its class or a RuntimeError on the others.
        RuntimeError: The ranks disagree, or the exchange failed. (ValueError for ``Terms.value_names``.)

    Communication: one gather of 512 bytes per rank the first time a combination of ``wire`` terms and grad mode is met
        on the group, and once more if gradients are then needed for the first time (``validate="always"``: each time;
        ``"never"``: not at all). The host waits for it.
    """
    error: Exception | None = None
    terms: Terms | None = None
    value: _T | None = None
    try:
        terms, value = make()
    except Exception as caught:  # whatever it is, the other ranks must not be left waiting
        error = caught
    compared = _compared.setdefault(context.process_group, _Compared())
    if error is not None and (context.validate == "never" or (context.validate == "first" and op in compared.ops)):
        raise error
    key = None if terms is None else (op, *terms.wire, terms.grad_mode)
    needs = terms is not None and terms.grad_mode and (terms.needs_grad or context.force_backward)
    known = compared.calls.get(key)
    call = _named(op, context.tag)
    if terms is not None and (context.validate == "never" or (context.validate == "first" and _settles(known, needs))):
        backward = needs or known is _Backward.EVERYBODY
        if backward and not terms.joins:
            raise _absent(call, "some rank needed a gradient in the first such call", context.rank,
                          f"run what is frozen under torch.no_grad(), or {_REMEDY}")  # fmt: skip
        return value, backward  # type: ignore[return-value]
    own = _describe(op, context, terms, needs, error)
    rows = collectives.gather_descriptors(own, context, device, f"{op} handshake")
    ranks = [json.loads(row.rstrip(b"\0")) for row in rows]
    _raise_errors(call, ranks, error)
    assert terms is not None
    _raise_disagreements(call, ranks, terms)
    needing = [rank["grad"] for rank in ranks]
    joins = [rank["joins"] for rank in ranks]
    if any(needing) and not all(joins):
        raise _absent(call, "some rank needs a gradient", joins.index(False), _REMEDY)
    compared.ops.add(op)
    compared.calls[key] = _after(known, needing)
    return value, any(needing)  # type: ignore[return-value]


def _settles(known: _Backward | None, needs: bool) -> bool:
    """Whether a call need not be compared: alike on all ranks, unless some alone come to need a gradient first."""
    return known is not None and not (known is _Backward.NOBODY and needs)


def _after(known: _Backward | None, needs: list[bool]) -> _Backward:
    """Return what is known of a call once the ranks have compared who ``needs`` a gradient."""
    if not any(needs):
        return known or _Backward.NOBODY
    if known in (_Backward.NOBODY, _Backward.WHO_NEEDS) and all(needs):
        return _Backward.WHO_NEEDS
    return _Backward.EVERYBODY


def digest(value: object) -> str:
    """Return a short hash of something whose repr is the same on all ranks."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:_DIGEST]


def _describe(op: str, context: CPContext, terms: Terms | None, needs: bool, error: Exception | None) -> bytes:
    fields: dict[str, Any] = {"op": op, "tag": str(context.tag)[:_TAG], "grad": needs}
    if error is not None or terms is None:
        kind = type(error).__name__ if type(error).__name__ in _RAISED else "RuntimeError"
        message = str(error).encode(errors="replace")
        for length in (_MESSAGE_BYTES, _MESSAGE_BYTES // 2, 0):  # quoting may make it several times as long
            fields |= {"error": kind, "message": message[:length].decode(errors="ignore")}
            if len(_encoded(fields)) <= DESCRIPTOR_BYTES:
                break
    else:
        of_context = (terms.grad_mode, context.validate, context.force_backward)  # _CONTEXT_TERMS
        values = [str(value) for value in (*(value for _, value in (*terms.wire, *terms.agreed)), *of_context)]
        fields |= {"terms": values, "joins": terms.joins}
        if len(_encoded(fields)) > DESCRIPTOR_BYTES:
            fields["terms"] = [value if len(value) <= _DIGEST else digest(value) for value in values]
    text = _encoded(fields)
    assert len(text) <= DESCRIPTOR_BYTES, "the terms of an operation fit its descriptor"
    return text.ljust(DESCRIPTOR_BYTES, b"\0")


def _encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def _named(op: str, tag: str) -> str:
    return f"{op} (tag {tag})" if tag else op


def _raise_errors(call: str, ranks: list[dict[str, Any]], error: Exception | None) -> None:
    if error is not None:
        raise error
    for rank, fields in enumerate(ranks):
        if "error" in fields:
            raise getattr(builtins, fields["error"])(f"{call}: rank {rank}: {fields['message']}")


def _raise_disagreements(call: str, ranks: list[dict[str, Any]], own: Terms) -> None:
    names = [name for name, _ in (*own.wire, *own.agreed)] + list(_CONTEXT_TERMS)
    first = ranks[0]
    for rank, fields in enumerate(ranks):
        if fields["op"] != first["op"] or len(fields["terms"]) != len(first["terms"]):
            runs = [_named(x["op"], x["tag"]) for x in (first, fields)]
            raise RuntimeError(f"{call}: ranks disagree on the operation: rank 0 runs {runs[0]}, rank {rank} {runs[1]}")
    for rank, fields in enumerate(ranks):
        for name, ours, theirs in zip(names, first["terms"], fields["terms"], strict=True):
            if ours != theirs:
                kind = ValueError if name in own.value_names else RuntimeError
                raise kind(f"{call}: ranks disagree on {name}: rank 0 has {ours}, rank {rank} has {theirs}")


def _absent(call: str, why: str, rank: int, remedy: str) -> RuntimeError:
    return RuntimeError(
        f"{call}: {why}, and the compiled graph of rank {rank} has no backward to take part in the exchange: {remedy}"
    )
