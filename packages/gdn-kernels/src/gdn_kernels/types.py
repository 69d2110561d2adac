"""Options and results shared by every operation of the package."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

import torch
from torch import Tensor


class Direction(str, enum.Enum):
    """Which frames a frame reads.

    ``forward``: up to and including its own. ``reverse``: strictly after its own. ``bidirectional``: all, its own once.
    """

    FORWARD = "forward"
    REVERSE = "reverse"
    BIDIRECTIONAL = "bidirectional"

    @property
    def reads_past(self) -> bool:
        """Whether the forward scan takes part."""
        return self is not Direction.REVERSE

    @property
    def reads_future(self) -> bool:
        """Whether the reverse scan takes part."""
        return self is not Direction.FORWARD


class Precision(str, enum.Enum):
    """Least precision that products of matrices may use. States and gates are fp32 in all of them.

    Published code numbers them 0, 1, 2; those numbers are accepted wherever a precision is.
    """

    BF16 = "bf16"
    TF32 = "tf32"
    IEEE = "ieee"


class Impl(str, enum.Enum):
    """Which implementation runs. ``auto`` takes Triton on CUDA and torch elsewhere; a named one runs or raises."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"


class FrameState(NamedTuple):
    """State after a frame: ``kv [B, H, D, D]``, rows are key channels, and ``z [B, H, D]``; fp32, or fp64 for fp64."""

    kv: Tensor
    z: Tensor


class FrameTransitions(NamedTuple):
    """Operators of every frame, decay not folded in; ``p_z`` and ``b`` are None without the z stream.

    ``p_kv [B, H, F, D, D]`` and ``p_z`` are symmetric to the last bit; ``a [B, H, F, D, D]`` is key by value,
    ``b [B, H, F, D]``.
    """

    p_kv: Tensor
    a: Tensor
    p_z: Tensor | None
    b: Tensor | None


class FrameGDNResult(NamedTuple):
    """``output [B, N, H, D]`` in the dtype of qkv; ``final_state`` is None unless asked for."""

    output: Tensor
    final_state: FrameState | None


class FrameGDNRawResult(NamedTuple):
    """``numerator [B, N, H, D]`` and ``denominator [B, H, N]``; ``final_state`` is None unless asked for."""

    numerator: Tensor
    denominator: Tensor
    final_state: FrameState | None


class FrameGDNNumeratorResult(NamedTuple):
    """``numerator [B, N, H, D]``; ``final_state`` is ``kv [B, H, D, D]`` or None: there is no z stream."""

    numerator: Tensor
    final_state: Tensor | None


class DeltaProductResult(NamedTuple):
    """``output [B, T, HV, V]`` in the dtype of q; ``final_state [N, HV, K, V]`` is None unless asked for."""

    output: Tensor
    final_state: Tensor | None


class RayTransforms(NamedTuple):
    """Rigid transforms of every token's viewing ray, ``[B, N, 4, 4]`` each, fp32 or fp64, inverse to one another.

    ``world_to_ray``: columns of world coordinates (x, y, z, 1) to those of the ray's frame; ``ray_to_world`` back.
    """

    world_to_ray: Tensor
    ray_to_world: Tensor


class CameraOperands(NamedTuple):
    """Operands of the camera branch's scan: ``q, k, v [B, N, H, D]`` in their inputs' dtype.

    ``inflation [B, H, F]``, fp32 (fp64): by how much the transform lengthened the keys of a frame, squared, on average.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    inflation: Tensor


class FrameInputs(NamedTuple):
    """Tensors of one call, checked. Either ``qkv [B, N, 3, H, D]``, or prepared ``q, k, v [B, N, H, D]`` with qkv None.

    ``beta [B, H, F, S]``, ``decay [B, H, F]``, norm weights ``[H, D]`` or None, rotary ``cos, sin [N, D/2]`` or None,
    ``frame_valid [B, F]`` or None. Fields are flat so that a gradient, a need or a dtype per field is the same tuple.
    """

    qkv: Tensor | None
    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    beta: Tensor
    decay: Tensor
    q_norm_weight: Tensor | None
    k_norm_weight: Tensor | None
    rope_cos: Tensor | None
    rope_sin: Tensor | None
    frame_valid: Tensor | None

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v, each ``[B, N, H, D]``."""
        if self.qkv is not None:
            q, k, v = self.qkv.unbind(2)
            return q, k, v
        assert self.q is not None
        assert self.k is not None
        assert self.v is not None
        return self.q, self.k, self.v

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of states, gates and statistics: fp64 for fp64 operands, fp32 otherwise."""
        q = self.qkv if self.qkv is not None else self.q
        assert q is not None
        return torch.float64 if q.dtype == torch.float64 else torch.float32


@dataclasses.dataclass(frozen=True)
class FrameOptions:
    """Everything about one call that is not a tensor; hashable.

    Attributes:
        features: q and k are raw: norm, ReLU, key scale and rotation are applied (False: operands come prepared).
        has_z: the z stream takes part.
        divide: the result is the output, not numerator and denominator; needs ``has_z``.
        direction: which scans run.
        resets: local frames f at which the reverse state handed to frame f - 1 is zero: interior chunk starts. Local
            frame 0 is listed if it is an interior start of the whole clip; it matters to the exit state only.
        k_scale, norm_eps, eps: scalars of the operation.
        precision, impl: resolved, never None or auto.
    """

    features: bool
    has_z: bool
    divide: bool
    direction: Direction
    resets: tuple[int, ...]
    k_scale: float
    norm_eps: float
    eps: float
    precision: Precision
    impl: Impl


class FrameBoundary(NamedTuple):
    """States at the two ends of a run of frames; absent directions and streams are None.

    As entry: ``forward`` is the state before the first frame, ``reverse`` the state that the last frame reads.
    As exit: ``forward`` is the state after the last frame, ``reverse`` what the frame before the run reads, that is
    with the first frame of the run written too. ``*_kv [B, H, D, D]``, ``*_z [B, H, D]``.
    """

    forward_kv: Tensor | None
    forward_z: Tensor | None
    reverse_kv: Tensor | None
    reverse_z: Tensor | None


class FrameSummary(NamedTuple):
    """A run of frames as one affine map per stream and direction: ``exit = transition @ entry + increment``.

    ``transition_kv [B, H, D, D]``, ``transition_z [B, H, D, D]`` belong to the forward direction; the reverse
    transition is the transpose, or zero if the run holds a reset. ``increment`` is the exit from zero entry states.
    """

    transition_kv: Tensor
    transition_z: Tensor | None
    increment: FrameBoundary
