"""Argument checks and their wording: argument, rule with letters, rule with numbers, what came.

No check reads device data.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gdn_kernels.types import Direction, FrameState, Impl, Precision

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PUBLISHED_PRECISION = {0: Precision.BF16, 1: Precision.TF32, 2: Precision.IEEE}
_E = TypeVar("_E", bound=enum.Enum)


def require_tensor(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def require_rank(name: str, value: Tensor, letters: str) -> None:
    """Raise ValueError unless ``value`` has as many dimensions as ``letters`` (comma separated)."""
    require_tensor(name, value)
    if value.ndim != len(letters.split(",")):
        raise ValueError(f"{name} must have shape [{letters}], got {list(value.shape)}")


def require_shape(name: str, value: Tensor, letters: str, shape: Sequence[int]) -> None:
    """Raise ValueError unless ``value`` has exactly ``shape``; ``letters`` is the rule, as in ``B, H, F, S``."""
    require_tensor(name, value)
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape [{letters}] = {list(shape)}, got {list(value.shape)}")


def require_dtype(name: str, value: Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raise ValueError unless the dtype of ``value`` is one of ``allowed``."""
    if value.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{name} must have dtype {names}, got {str(value.dtype).removeprefix('torch.')}")


def require_device(name: str, value: Tensor, device: torch.device, owner: str) -> None:
    """Raise ValueError unless ``value`` lives on ``device``, which is the device of ``owner``."""
    if value.device != device:
        raise ValueError(f"{name} must be on the device of {owner} ({device}), got {value.device}")


def require_positive(name: str, value: float) -> float:
    """Return ``value`` as a float; TypeError unless it is a number, ValueError unless it is finite and > 0."""
    number = _number(name, value)
    if not 0.0 < number < float("inf"):
        raise ValueError(f"{name} must be a finite number > 0, got {value}")
    return number


def require_non_negative(name: str, value: float) -> float:
    """Return ``value`` as a float; TypeError unless it is a number, ValueError unless it is finite and >= 0."""
    number = _number(name, value)
    if not 0.0 <= number < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")
    return number


def as_direction(value: Direction | str) -> Direction:
    """Return the direction that ``value`` names."""
    return _as_option("direction", value, Direction)


def as_precision(value: Precision | str | int | None, dtype: torch.dtype) -> Precision:
    """Return the precision that ``value`` names; None is bf16 for 16-bit inputs and ieee for wider ones."""
    if value is None:
        return Precision.BF16 if dtype in (torch.float16, torch.bfloat16) else Precision.IEEE
    if isinstance(value, int) and not isinstance(value, bool):
        if value not in _PUBLISHED_PRECISION:
            raise ValueError(f"precision must be one of 'bf16', 'tf32', 'ieee' or 0, 1, 2, got {value}")
        return _PUBLISHED_PRECISION[value]
    return _as_option("precision", value, Precision)


def as_impl(value: Impl | str) -> Impl:
    """Return the implementation that ``value`` names."""
    return _as_option("impl", value, Impl)


def as_chunk_starts(value: Sequence[int] | None, frames: int) -> tuple[int, ...]:
    """Return the interior chunk starts of a clip of ``frames`` frames: increasing, without 0.

    Raises:
        TypeError: Not a sequence of ints (a tensor would need a read of device data).
        ValueError: Not strictly increasing, or a start outside ``0 ... frames - 1``.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        raise TypeError(f"chunk_starts must be a tuple of ints or None, got {_describe(value)}")
    if any(later <= earlier for earlier, later in zip(value, value[1:], strict=False)):
        raise ValueError(f"chunk_starts must be strictly increasing, got {tuple(value)}")
    if value and (value[0] < 0 or value[-1] >= max(frames, 1)):
        raise ValueError(f"chunk_starts must lie in 0 ... F - 1 = {max(frames, 1) - 1}, got {tuple(value)}")
    return tuple(start for start in value if start > 0)


def require_frame_state(
    name: str, state: FrameState, batch: int, heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Check both parts of a state: shape, dtype, device. They come together."""
    if not isinstance(state, FrameState):
        raise TypeError(f"{name} must be a FrameState(kv, z), got {_describe(state)}")
    require_state(f"{name}.kv", state.kv, "B, H, D, D", (batch, heads, width, width), dtype, device)
    require_state(f"{name}.z", state.z, "B, H, D", (batch, heads, width), dtype, device)


def require_state(
    name: str, value: Tensor, letters: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Check one part of a state: shape, dtype, device."""
    require_shape(name, value, letters, shape)
    require_dtype(name, value, (dtype,))
    require_device(name, value, device, "the inputs")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {_describe(value)}")
    return float(value)


def _as_option(name: str, value: Any, kind: type[_E]) -> _E:
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {_describe(value)}")
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}") from None


def _describe(value: object) -> str:
    return f"{type(value).__name__} {value!r}" if isinstance(value, int | float | str) else type(value).__name__
