"""Activation checkpointing that does not send twice."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_KEPT = ("exchange", "exchange_uneven", "frame_gdn", "halo")


def keep_exchanges() -> tuple[Any, Any]:
    """Give `torch.utils.checkpoint` a policy that keeps what exchanges returned and computes all else again.

    A checkpointed block then makes one exchange forward and one backward instead of two and one. Kept are the gathered
    summaries, whose size does not grow with frames or tokens, and received halo frames. A block that is compiled as a
    whole keeps the results of its context-parallel operations instead.

    Without it checkpointing is right too: the recomputed forward sends again, in the same order on all ranks.

    Communication: none. Every rank must use it if one does: the numbers of exchanges have to agree.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.rand(3, requires_grad=True)
        >>> y = checkpoint(torch.sin, x, use_reentrant=False, context_fn=keep_exchanges)
        >>> y.sum().backward()
        >>> torch.equal(x.grad, x.detach().cos())
        True
    """
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    operators = [getattr(torch.ops.gdn_cp, name) for name in _KEPT if hasattr(torch.ops.gdn_cp, name)]
    if any(op == operator.default for operator in operators):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
