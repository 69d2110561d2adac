"""Affine maps of states, ``state -> transition @ state + increment``: algebra only, no communication.

Composition is associative, not commutative. Products are made in fp64 where the device has it and rounded once, so that
they depend neither on a global TF32 switch nor on the order in which maps are folded, beyond that one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AffineMap(NamedTuple):
    """``transition [..., D, D]`` and ``increment [..., D, V]``: ``state -> transition @ state + increment``."""

    transition: Tensor
    increment: Tensor


def apply(m: AffineMap, state: Tensor) -> Tensor:
    """Return ``transition @ state + increment`` for ``state [..., D, V]``, in the dtype of ``state``."""
    wide = _wide(state)
    return (m.transition.to(wide) @ state.to(wide) + m.increment.to(wide)).to(state.dtype)


def compose(later: AffineMap, earlier: AffineMap) -> AffineMap:
    """Return the map that applies ``earlier`` first."""
    wide = _wide(later.transition)
    transition = (later.transition.to(wide) @ earlier.transition.to(wide)).to(later.transition.dtype)
    return AffineMap(transition, apply(later, earlier.increment))


def identity(like: AffineMap) -> AffineMap:
    """Return the map that changes nothing, in the shapes of ``like``."""
    width = like.transition.shape[-1]
    eye = torch.eye(width, dtype=like.transition.dtype, device=like.transition.device)
    return AffineMap(eye.expand_as(like.transition).clone(), torch.zeros_like(like.increment))


def fold(maps: Sequence[AffineMap], state: Tensor) -> Tensor:
    """Return ``state`` after all maps, applied in order."""
    carried = state.to(_wide(state))
    for m in maps:
        carried = m.transition.to(carried.dtype) @ carried + m.increment.to(carried.dtype)
    return carried.to(state.dtype)


def exclusive(maps: Sequence[AffineMap], state: Tensor) -> list[Tensor]:
    """Return the states before each map."""
    return states_between(maps, state)[:-1]


def states_between(maps: Sequence[AffineMap], state: Tensor) -> list[Tensor]:
    """Return the states before the first map, between maps and after the last; carried wide, rounded once."""
    carried = state.to(_wide(state))
    states = [carried]
    for m in maps:
        carried = m.transition.to(carried.dtype) @ carried + m.increment.to(carried.dtype)
        states.append(carried)
    return [x.to(state.dtype) for x in states]


def adjoint(m: AffineMap, gamma: Tensor) -> AffineMap:
    """Return the map from the gradient of the exit state to that of the entry state: ``(transition', gamma)``."""
    return AffineMap(m.transition.mT, gamma)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` in the dtype of ``left``, rounded once."""
    wide = _wide(left)
    return (left.to(wide) @ right.to(wide)).to(left.dtype)


def _wide(x: Tensor) -> torch.dtype:
    """Return fp64, or the own dtype on devices without it."""
    return x.dtype if x.device.type == "mps" else torch.float64
