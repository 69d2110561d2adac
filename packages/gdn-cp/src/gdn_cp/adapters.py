"""Published names between per-frame operators and the published cross-rank scan, with the published conventions.

The published scan keeps the transposed state, ``S_t = S_{t-1} @ W_t + U_t`` with ``S = kv'``; its z stream is the left
form ``z_t = W_z,t @ z_{t-1} + U_z,t``. Everywhere else in this project both streams are in the left form.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gdn_kernels import checks


@dataclasses.dataclass(frozen=True)
class CpFusedTransitionBundle:
    """What `cp_frame_gdn_scan` takes, and the widths that lead back.

    Attributes:
        W_kv: ``[B*H, T_local, D, D]``, applied from the right.
        U_kv: ``[B*H, T_local, D, D]``, value by key.
        W_z: ``[B*H, T_local, D, D]``, applied from the left; size 0 without a z stream.
        U_z: ``[B*H, T_local, D]``; size 0 without a z stream.
        block_d: width that the operators were padded to.
        head_dim: D.
    """

    W_kv: Tensor
    U_kv: Tensor
    W_z: Tensor
    U_z: Tensor
    block_d: int
    head_dim: int


def phase_a_to_cp_scan_transitions(
    I_P_kv: Tensor,
    A_kv: Tensor,
    I_P_z: Tensor,
    B_z: Tensor,
    decay: Tensor,
    *,
    head_dim: int,
    skip_z: bool = False,
) -> CpFusedTransitionBundle:
    """Turn per-frame operators into the transitions and inputs of `cp_frame_gdn_scan`.

        W_kv = (decay * I_P_kv)'     U_kv = A_kv'     W_z = decay * I_P_z     U_z = B_z        the active D x D block

    Args:
        I_P_kv: ``[B*H, T_local, BLOCK_D, BLOCK_D]``, ``I - P`` with the decay not folded in, any floating dtype. Rows
            and columns from ``head_dim`` on are padding and not read.
        A_kv: as ``I_P_kv``; key by value, ``P``'s keys times beta times v.
        I_P_z: as ``I_P_kv``, for the z stream.
        B_z: ``[B*H, T_local, BLOCK_D]``.
        decay: reshapes, or broadcasts, to ``[B*H, T_local]``.
        head_dim: D, ``1 ... BLOCK_D``.
        skip_z: leave the z stream out: ``I_P_z`` and ``B_z`` are ignored, ``W_z`` and ``U_z`` have size 0. The scan
            does not take such a bundle.

    Returns:
        CpFusedTransitionBundle: contiguous, fp32 (fp64 for fp64 ``I_P_kv``).

    Raises:
        ValueError: ``I_P_kv`` is not ``[B*H, T_local, BLOCK_D, BLOCK_D]``, ``head_dim`` is out of range, another
            tensor's shape does not fit.

    Cost: one pass over the operators. Communication: none. Gradient: to every tensor but what ``skip_z`` ignores.

    Example:
        >>> I_P_kv, A_kv, I_P_z = torch.rand(3, 2, 5, 8, 8)
        >>> bundle = phase_a_to_cp_scan_transitions(
        ...     I_P_kv, A_kv, I_P_z, torch.rand(2, 5, 8), torch.rand(2, 5), head_dim=6
        ... )
        >>> bundle.W_kv.shape, bundle.U_z.shape
        (torch.Size([2, 5, 6, 6]), torch.Size([2, 5, 6]))
    """
    checks.require_rank("I_P_kv", I_P_kv, "B*H, T_local, BLOCK_D, BLOCK_D")
    lead, block_d = I_P_kv.shape[:2], I_P_kv.shape[3]
    checks.require_shape("I_P_kv", I_P_kv, "B*H, T_local, BLOCK_D, BLOCK_D", (*lead, block_d, block_d))
    if not 1 <= head_dim <= block_d:
        raise ValueError(f"head_dim must lie in 1 ... BLOCK_D = {block_d}, got {head_dim}")
    checks.require_shape("A_kv", A_kv, "B*H, T_local, BLOCK_D, BLOCK_D", I_P_kv.shape)
    wide = torch.float64 if I_P_kv.dtype == torch.float64 else torch.float32
    gate = _gate(decay, lead).to(wide)[..., None, None]
    W_kv = (gate * _active(I_P_kv, head_dim).to(wide)).mT.contiguous()
    U_kv = _active(A_kv, head_dim).to(wide).mT.contiguous()
    if skip_z:
        nothing = torch.empty(0, dtype=wide, device=I_P_kv.device)
        return CpFusedTransitionBundle(W_kv, U_kv, nothing, nothing, block_d, head_dim)
    checks.require_shape("I_P_z", I_P_z, "B*H, T_local, BLOCK_D, BLOCK_D", I_P_kv.shape)
    checks.require_shape("B_z", B_z, "B*H, T_local, BLOCK_D", I_P_kv.shape[:3])
    W_z = (gate * _active(I_P_z, head_dim).to(wide)).contiguous()
    U_z = B_z[..., :head_dim].to(wide).contiguous()
    return CpFusedTransitionBundle(W_kv, U_kv, W_z, U_z, block_d, head_dim)


def cp_scan_states_to_phase_c_states(S_kv: Tensor, S_z: Tensor, *, block_d: int) -> tuple[Tensor, Tensor]:
    """Turn the states of `cp_frame_gdn_scan` into those a read-out takes: key-first and padded with zeros.

    Args:
        S_kv: ``[B*H, T_local, D, D]``, value-first.
        S_z: ``[B*H, T_local, D]``.
        block_d: width to pad to, at least D.

    Returns:
        tuple[Tensor, Tensor]: ``[B*H, T_local, block_d, block_d]`` with ``S_kv'`` in the first D rows and columns, and
        ``[B*H, T_local, block_d]``; dtypes kept.

    Raises:
        ValueError: ``S_kv`` is not ``[B*H, T_local, D, D]``, D is above ``block_d``, or ``S_z`` does not fit.

    Communication: none. Gradient: to both.

    Example:
        >>> kv, z = cp_scan_states_to_phase_c_states(torch.rand(2, 3, 6, 6), torch.rand(2, 3, 6), block_d=8)
        >>> kv.shape, z.shape
        (torch.Size([2, 3, 8, 8]), torch.Size([2, 3, 8]))
    """
    checks.require_rank("S_kv", S_kv, "B*H, T_local, D, D")
    lead, width = S_kv.shape[:2], S_kv.shape[3]
    checks.require_shape("S_kv", S_kv, "B*H, T_local, D, D", (*lead, width, width))
    if width > block_d:
        raise ValueError(f"block_d must be >= D = {width}, got {block_d}")
    checks.require_shape("S_z", S_z, "B*H, T_local, D", (*lead, width))
    pad = block_d - width
    return torch.nn.functional.pad(S_kv.mT, (0, pad, 0, pad)), torch.nn.functional.pad(S_z, (0, pad))


def _active(x: Tensor, width: int) -> Tensor:
    return x[..., :width, :width]


def _gate(decay: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Return decay as ``[B*H, T_local]``."""
    checks.require_tensor("decay", decay)
    rows, frames = lead
    if decay.numel() == rows * frames:
        return decay.reshape(rows, frames)
    try:
        return decay.expand(rows, frames)
    except RuntimeError:
        raise ValueError(
            f"decay must reshape or broadcast to [B*H, T_local] = [{rows}, {frames}], got {list(decay.shape)}"
        ) from None
