"""Layers whose weights a fused operation reads, so that their own forward never runs."""

from __future__ import annotations

from torch import nn


def require_plain(name: str, layer: nn.Module | None, kind: type[nn.Module]) -> None:
    """Raise TypeError unless ``layer`` is a ``kind`` with the forward of that class.

    A wrapper put in its place, an adapter for instance, would be left out without a word. Parametrisations and shards
    of a weight are seen by whoever reads it, and pass.
    """
    if not isinstance(layer, kind) or type(layer).forward is not kind.forward or "forward" in vars(layer):
        own = " with a forward of its own" if isinstance(layer, kind) else ""
        raise TypeError(
            f"{name} must be a torch.nn.{kind.__name__} whose weight can be read, got {type(layer).__name__}{own}"
        )
