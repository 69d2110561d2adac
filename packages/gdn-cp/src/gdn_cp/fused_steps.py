"""The two autograd Functions that published fused wrappers are made of, in plain torch.

Both keep their inputs alone and compute the rest again in the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_cp.adapters import phase_a_to_cp_scan_transitions
from gdn_kernels import RotaryTables, checks
from gdn_kernels.once import once_differentiable
from gdn_kernels.reference.frame_gdn import frame_transitions
from gdn_kernels.rope import rotate


class _CpFusedGdnPrep(torch.autograd.Function):
    """RMSNorm and the operators of every frame, as `cp_frame_gdn_scan` takes them.

    ``apply(qkv, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin, F, S, k_scale, norm_eps=1e-5,
    dot_precision=0) -> (W_kv, U_kv, W_z, U_z, qkv_normed)``; arguments as in `cp_fused_gdn_chunkwise_raw_autograd`,
    results as in `phase_a_to_cp_scan_transitions`, ``qkv_normed`` in the dtype of qkv with v as it is. Products are in
    fp32 (fp64 for fp64), which every ``dot_precision`` allows. Gradients: qkv, gates, norm weights.

    Raises:
        ValueError: ``qkv.shape[2]`` is not 3, N is not F*S, or another shape or value is wrong.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        beta: Tensor,
        decay: Tensor,
        q_norm_weight: Tensor | None,
        k_norm_weight: Tensor | None,
        rope_cos: Tensor,
        rope_sin: Tensor,
        F: int,
        S: int,
        k_scale: float,
        norm_eps: float = 1e-5,
        dot_precision: int = 0,
    ) -> tuple[Tensor, ...]:
        require_precision(dot_precision)
        heads, width = _require_qkv("qkv", qkv, F, S)
        checks.require_shape("beta", beta, "B, H, F, S", (qkv.shape[0], heads, F, S))
        checks.require_shape("decay", decay, "B, H, F", (qkv.shape[0], heads, F))
        for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
            if weight is not None and weight.numel() != heads * width:
                raise ValueError(f"{name} must have shape [H*D] = [{heads * width}], got {list(weight.shape)}")
        check_tables("rope_cos", "rope_sin", rope_cos, rope_sin, qkv.shape[1], width)
        checks.require_positive("k_scale", k_scale)
        checks.require_non_negative("norm_eps", norm_eps)
        ctx.steps = functools.partial(_prepare, k_scale=k_scale, norm_eps=norm_eps)
        ctx.set_materialize_grads(False)
        given = (qkv, beta, decay, q_norm_weight, k_norm_weight, rope_cos, rope_sin)
        ctx.save_for_backward(*given)
        return _prepare(*given, k_scale=k_scale, norm_eps=norm_eps)

    @staticmethod
    @once_differentiable("_CpFusedGdnPrep")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return _again(ctx.steps, ctx.saved_tensors, gradients, ctx.needs_input_grad)


class _CpFusedGdnOutput(torch.autograd.Function):
    """The read-out from the states of `cp_frame_gdn_scan`.

    ``apply(qkv_normed, rope_cos, rope_sin, S_kv, S_z, block_d, F, S, dot_precision=0) -> (num, den)``: ``num [B, N, H,
    D]`` and ``den [B, H, N]``, bf16 at ``dot_precision=0``, else fp32 (fp64). Gradients: qkv_normed (its k and v get
    zeros) and the states.

    Raises:
        ValueError: ``qkv_normed.shape[2]`` is not 3, N is not F*S, a state has another shape, D is above ``block_d``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_normed: Tensor,
        rope_cos: Tensor,
        rope_sin: Tensor,
        S_kv: Tensor,
        S_z: Tensor,
        block_d: int,
        F: int,
        S: int,
        dot_precision: int = 0,
    ) -> tuple[Tensor, ...]:
        require_precision(dot_precision)
        heads, width = _require_qkv("qkv_normed", qkv_normed, F, S)
        rows = qkv_normed.shape[0] * heads
        checks.require_shape("S_kv", S_kv, "B*H, F, D, D", (rows, F, width, width))
        checks.require_shape("S_z", S_z, "B*H, F, D", (rows, F, width))
        if block_d < width:
            raise ValueError(f"block_d must be >= D = {width}, got {block_d}")
        check_tables("rope_cos", "rope_sin", rope_cos, rope_sin, qkv_normed.shape[1], width)
        dtype = torch.bfloat16 if dot_precision == 0 else _state_dtype(qkv_normed)
        ctx.steps = functools.partial(_read_out, grid=(F, S), dtype=dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(qkv_normed, rope_cos, rope_sin, S_kv, S_z)
        return _read_out(qkv_normed, rope_cos, rope_sin, S_kv, S_z, grid=(F, S), dtype=dtype)

    @staticmethod
    @once_differentiable("_CpFusedGdnOutput")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return _again(ctx.steps, ctx.saved_tensors, gradients, ctx.needs_input_grad)


def require_precision(dot_precision: int) -> int:
    """Return 0, 1 or 2; TypeError unless it is an int, ValueError for another one."""
    if isinstance(dot_precision, bool) or not isinstance(dot_precision, int):
        raise TypeError(f"dot_precision must be an int, got {type(dot_precision).__name__}")
    if dot_precision not in (0, 1, 2):
        raise ValueError(f"dot_precision must be 0 (bf16), 1 (tf32) or 2 (ieee), got {dot_precision}")
    return dot_precision


def check_tables(cos_name: str, sin_name: str, cos: Tensor, sin: Tensor, tokens: int, width: int) -> None:
    """Check published tables: ``[N, D]``, floating."""
    if width % 2:
        raise ValueError(f"{cos_name} needs an even head width, got D = {width}")
    for name, table in ((cos_name, cos), (sin_name, sin)):
        checks.require_shape(name, table, "N, D", (tokens, width))
        checks.require_dtype(name, table, checks.FLOATING)


def half_tables(cos: Tensor, sin: Tensor) -> RotaryTables:
    """Return published tables ``[N, D]`` with one entry per pair; the second of a pair has the sine's own sign."""
    dtype = torch.float64 if cos.dtype == torch.float64 else torch.float32
    return RotaryTables(cos.detach()[:, 0::2].to(dtype), sin.detach()[:, 1::2].to(dtype))


def _prepare(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    rope_cos: Tensor,
    rope_sin: Tensor,
    *,
    k_scale: float,
    norm_eps: float,
) -> tuple[Tensor, ...]:
    frames, spatial = beta.shape[2:]
    with torch.autocast(qkv.device.type, enabled=False):
        dtype = _state_dtype(qkv)
        q, k, v = qkv.to(dtype).unbind(2)
        normed = qkv
        if q_norm_weight is not None or k_norm_weight is not None:
            q, k = _rms_norm(q, q_norm_weight, norm_eps), _rms_norm(k, k_norm_weight, norm_eps)
            normed = torch.stack((q, k, v), dim=2).to(qkv.dtype)
        k = torch.relu(k) * k_scale
        kr = rotate(k, half_tables(rope_cos, rope_sin))
        k, kr, v = (_frame_major(x, frames, spatial) for x in (k, kr, v))
        p_kv, a, p_z, b = frame_transitions(k, kr, v, beta.to(dtype))
        assert p_z is not None
        assert b is not None
        eye = torch.eye(qkv.shape[-1], dtype=dtype, device=qkv.device)
        bundle = phase_a_to_cp_scan_transitions(
            (eye - p_kv).flatten(0, 1), a.flatten(0, 1), (eye - p_z).flatten(0, 1), b.flatten(0, 1),
            decay.to(dtype).flatten(0, 1), head_dim=qkv.shape[-1],
        )  # fmt: skip
    return bundle.W_kv, bundle.U_kv, bundle.W_z, bundle.U_z, normed


def _read_out(
    qkv_normed: Tensor,
    rope_cos: Tensor,
    rope_sin: Tensor,
    S_kv: Tensor,
    S_z: Tensor,
    *,
    grid: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    lead = qkv_normed.shape[0], qkv_normed.shape[3]
    with torch.autocast(qkv_normed.device.type, enabled=False):
        q = torch.relu(qkv_normed[:, :, 0].to(_state_dtype(qkv_normed)))
        qr = _frame_major(rotate(q, half_tables(rope_cos, rope_sin)), *grid)
        kv, z = (x.to(q.dtype).reshape(*lead, *x.shape[1:]) for x in (S_kv.mT, S_z))
        numerator, denominator = qr @ kv, (_frame_major(q, *grid) @ z[..., None]).squeeze(-1)
    return numerator.permute(0, 2, 3, 1, 4).flatten(1, 2).to(dtype), denominator.flatten(2).to(dtype)


def _again(
    steps: Callable[..., tuple[Tensor, ...]],
    saved: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments of a Function whose first ones are ``saved``, by running it again."""
    leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(saved, needs, strict=False)]
    with torch.enable_grad():
        results = steps(*leaves)
    pairs = [(y, dy) for y, dy in zip(results, gradients, strict=True) if dy is not None and y.requires_grad]
    wanted = {i: x for i, x in enumerate(leaves) if x is not None and x.requires_grad}
    found: list[Tensor | None] = [None] * len(needs)
    if pairs:
        outputs, upstream = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, list(wanted.values()), upstream, allow_unused=True)
        for i, gradient in zip(wanted, grads, strict=True):
            found[i] = gradient
    return tuple(found)


def _rms_norm(x: Tensor, weight: Tensor | None, norm_eps: float) -> Tensor:
    """Normalise over all channels of a token; ``x [B, N, H, D]``."""
    x = x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + norm_eps)
    return x if weight is None else x * weight.to(x.dtype).reshape(x.shape[-2:])


def _frame_major(x: Tensor, frames: int, spatial: int) -> Tensor:
    """``[B, N, H, D]`` to ``[B, H, F, S, D]``."""
    return x.reshape(x.shape[0], frames, spatial, *x.shape[2:]).permute(0, 3, 1, 2, 4)


def _state_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _require_qkv(name: str, qkv: Tensor, F: int, S: int) -> tuple[int, int]:
    """Check ``[B, N, 3, H, D]`` with N = F*S; return H and D."""
    checks.require_rank(name, qkv, "B, N, 3, H, D")
    checks.require_dtype(name, qkv, checks.FLOATING)
    _, tokens, three, heads, width = qkv.shape
    if three != 3:
        raise ValueError(f"{name} must have shape [B, N, 3, H, D], got {list(qkv.shape)}")
    require_tokens(name, tokens, F, S)
    return heads, width


def require_tokens(name: str, tokens: int, F: int, S: int) -> None:
    """Raise ValueError unless N = F*S."""
    if tokens != F * S:
        raise ValueError(f"{name} must have N = F*S = {F}*{S} = {F * S} tokens, got {tokens}")
