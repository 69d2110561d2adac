"""What all stages of one Triton call share."""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl
from torch import Tensor

from gdn_kernels.types import FrameInputs, FrameOptions, Precision


@dataclasses.dataclass(frozen=True)
class TritonCall:
    """Flags, scalars and small tensors that every stage of a call reads.

    Attributes:
        features, has_z, divide, k_scale, norm_eps, eps: see `FrameOptions`.
        precision: of products. ``operand_dtype``, ``operand`` and ``dot`` follow from it.
        q_weight, k_weight: ``[H, D]`` or None.
        cos, sin: ``[N, D/2]`` fp32 or None.
        valid: ``[B, F]`` fp32 or None.
        has_norm: RMSNorm is applied.
    """

    features: bool
    has_z: bool
    divide: bool
    has_norm: bool
    k_scale: float
    norm_eps: float
    eps: float
    precision: Precision
    q_weight: Tensor | None
    k_weight: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    valid: Tensor | None

    @property
    def operand_dtype(self) -> torch.dtype:
        """Dtype in which operands of products, and operators between phases, are kept."""
        return torch.bfloat16 if self.precision is Precision.BF16 else torch.float32

    @property
    def operand(self) -> tl.dtype:
        """`operand_dtype` as Triton names it."""
        return tl.bfloat16 if self.precision is Precision.BF16 else tl.float32

    @property
    def dot(self) -> str:
        """Input precision that every product of this call names."""
        return "tf32" if self.precision is Precision.TF32 else "ieee"


def triton_call(inputs: FrameInputs, options: FrameOptions) -> TritonCall:
    """Gather what the stages share from a checked call."""
    valid = inputs.frame_valid
    return TritonCall(
        options.features, options.has_z, options.divide,
        options.features and (inputs.q_norm_weight is not None or inputs.k_norm_weight is not None),
        options.k_scale if options.features else 1.0, options.norm_eps, options.eps, options.precision,
        _contiguous(inputs.q_norm_weight), _contiguous(inputs.k_norm_weight),
        _fp32(inputs.rope_cos), _fp32(inputs.rope_sin), None if valid is None else valid.float().contiguous(),
    )  # fmt: skip


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _fp32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()
