"""Before the first payload of a kind of call, the ranks compare what they are about to do.

One fixed-size descriptor per rank is gathered: what must be equal, and whether the rank's own arguments are in order.
So a mistake on one rank is an error on all of them, and buffers of unequal size, which end a process from inside the
library that sends them, are never sent.
"""

from __future__ import annotations

import builtins
import dataclasses
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
_RAISED = ("ValueError", "TypeError", "NotImplementedError", "RuntimeError")
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
    """

    wire: tuple[tuple[str, Any], ...]
    agreed: tuple[tuple[str, Any], ...]
    needs_grad: bool
    grad_mode: bool
    value_names: tuple[str, ...] = ()


_seen: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


def agree(
    op: str, context: CPContext, device: torch.device | None, make: Callable[[], tuple[Terms, _T]]
) -> tuple[_T, bool]:
    """Run ``make``, compare its terms over the ranks if need be, and return its value and whether a backward will run.

    Args:
        op: name of the operation, the start of every message.
        context: the ranks.
        device: where the descriptor travels; None is the CPU.
        make: checks the arguments and returns the rank's terms and whatever the caller goes on with.

    Raises:
        ValueError, TypeError, NotImplementedError: ``make`` raised it, on this rank or on another, named.
        RuntimeError: The ranks disagree, or the exchange failed. (ValueError for ``Terms.value_names``.)

    Communication: one gather of 512 bytes per rank the first time a combination of ``wire`` terms is met on the group
        (``validate="always"``: each time; ``"never"``: not at all). The host waits for it.
    """
    error: Exception | None = None
    terms: Terms | None = None
    value: _T | None = None
    try:
        terms, value = make()
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as caught:
        error = caught
    seen = _seen.setdefault(context.process_group, {})
    key = (op, *(terms.wire if terms else ()), *((terms.needs_grad, terms.grad_mode) if terms else ()))
    if error is not None and (context.validate == "never" or (context.validate == "first" and (op,) in seen)):
        raise error
    if context.validate == "never" or (context.validate == "first" and key in seen):
        assert terms is not None
        backward = seen.get(key, terms.needs_grad) or context.force_backward
        return value, backward and terms.grad_mode  # type: ignore[return-value]
    own = _describe(terms, error)
    rows = collectives.gather_descriptors(own, context, device or torch.device("cpu"), f"{op} handshake")
    ranks = [json.loads(row.rstrip(b"\0")) for row in rows]
    _raise_errors(op, context.rank, ranks, error)
    _raise_disagreements(op, ranks, own_terms=terms)
    assert terms is not None
    some = any(rank["grad"] for rank in ranks)
    seen[(op,)] = True
    seen[key] = some
    return value, (some or context.force_backward) and terms.grad_mode  # type: ignore[return-value]


def digest(value: object) -> str:
    """Return a short hash of something whose repr is the same on all ranks."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _describe(terms: Terms | None, error: Exception | None) -> bytes:
    if error is not None or terms is None:
        kind = type(error).__name__ if type(error).__name__ in _RAISED else "RuntimeError"
        message = str(error).encode()[:_MESSAGE_BYTES].decode(errors="ignore")
        fields: dict[str, Any] = {"error": kind, "message": message, "grad": False}
    else:
        pairs = (*terms.wire, *terms.agreed, ("grad mode", terms.grad_mode))
        fields = {"terms": [str(value) for _, value in pairs], "grad": terms.needs_grad}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > DESCRIPTOR_BYTES and "message" in fields:
        fields["message"] = fields["message"][: _MESSAGE_BYTES // 2]
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(text) <= DESCRIPTOR_BYTES, "the terms of an operation fit its descriptor"
    return text.ljust(DESCRIPTOR_BYTES, b"\0")


def _raise_errors(op: str, own_rank: int, ranks: list[dict[str, Any]], error: Exception | None) -> None:
    if error is not None:
        raise error
    for rank, fields in enumerate(ranks):
        if "error" in fields and rank != own_rank:
            raise getattr(builtins, fields["error"])(f"{op}: rank {rank}: {fields['message']}")


def _raise_disagreements(op: str, ranks: list[dict[str, Any]], own_terms: Terms | None) -> None:
    assert own_terms is not None
    names = [*(name for name, _ in (*own_terms.wire, *own_terms.agreed)), "grad mode"]
    first = ranks[0]["terms"]
    for rank, fields in enumerate(ranks):
        for name, ours, theirs in zip(names, first, fields["terms"], strict=True):
            if ours != theirs:
                kind = ValueError if name in own_terms.value_names else RuntimeError
                raise kind(f"{op}: ranks disagree on {name}: rank 0 has {ours}, rank {rank} has {theirs}")
