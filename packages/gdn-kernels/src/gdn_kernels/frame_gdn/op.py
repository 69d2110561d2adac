"""The public operations of the frame-wise gated delta network: checks, defaults and dispatch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from gdn_kernels import checks
from gdn_kernels.frame_gdn import stages
from gdn_kernels.rope import RotaryTables
from gdn_kernels.types import (
    Direction,
    FrameBoundary,
    FrameGDNNumeratorResult,
    FrameGDNRawResult,
    FrameGDNResult,
    FrameInputs,
    FrameOptions,
    FrameState,
    Impl,
    Precision,
)

WIDEST_TRITON_HEAD = 256
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def frame_gdn(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    rope: RotaryTables | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    k_scale: float = 1.0,
    direction: Direction | str = Direction.FORWARD,
    chunk_starts: Sequence[int] | None = None,
    frame_valid: Tensor | None = None,
    initial_state: FrameState | None = None,
    output_final_state: bool = False,
    norm_eps: float = 1e-5,
    eps: float = 1e-6,
    precision: Precision | str | int | None = None,
    impl: Impl | str = Impl.AUTO,
) -> FrameGDNResult:
    """Mix the tokens of a video with the frame-wise gated delta rule.

        q, k     = ReLU(RMSNorm(q)), k_scale ReLU(RMSNorm(k));   qr, kr = q, k turned by the rotary tables
        kv_f     = decay_f (I - kr_f' diag(beta_f) kr_f) kv_{f-1} + kr_f' diag(beta_f) v_f
        z_f      = decay_f (I - k_f' diag(beta_f) k_f) z_{f-1} + k_f' beta_f
        output_f = (qr_f kv_f) / (q_f z_f + eps)

    All tokens of a frame write at once, after the state was decayed; every token reads the state its own frame has
    already written. In the reverse direction a frame reads the frames after it only, and a step is gated by the frame
    being written. Both directions add up before one division. The denominator is not clamped: it may be negative.

    Args:
        qkv: ``[B, N, 3, H, D]``, fp16, bf16, fp32 or fp64, any strides. N = F*S, frame-major.
        beta: ``[B, H, F, S]``, write strength per token, >= 0. Any floating dtype.
        decay: ``[B, H, F]``, linear, in [0, 1]; `gated_delta_product` takes the logarithm. Any floating dtype.
        rope: ``cos`` and ``sin``, each ``[N, D/2]`` fp32; None rotates nothing. v is never rotated.
        q_norm_weight: ``[H*D]`` or ``[H, D]``. RMSNorm runs over all H*D channels of a token, for q and for k, if one
            of the two weights is given; the other one then is 1. With neither there is no normalisation.
        k_norm_weight: the same for k.
        k_scale: factor of k, > 0; usually ``(D*S) ** -0.5``. Much larger ones make the recurrence expand.
        direction: ``"forward"`` reads frames up to and including its own, ``"reverse"`` those after it,
            ``"bidirectional"`` all.
        chunk_starts: increasing frames at which the reverse scan starts anew; 0 is optional. A frame then reads all
            frames before the end of its chunk. None is one chunk. Nothing changes in the forward scan: checked, and
            ignored, with ``direction="forward"``.
        frame_valid: ``[B, F]``, bool or 0/1. An invalid frame writes nothing, forgets nothing and outputs 0. It is
            multiplied by 0, not cut out, so what it holds must be finite. Values are not read: a fraction, as 0.5,
            takes that share of the frame's write, of its forgetting, and of numerator and denominator, whose ratio
            it all but leaves.
        initial_state: ``kv [B, H, D, D]`` key-first and ``z [B, H, D]``, fp32 (fp64 for fp64 qkv); zeros if None. The
            state before the first frame, for the forward scan. Receives a gradient.
        output_final_state: return the forward state after the last frame.
        norm_eps: added to the mean square in RMSNorm, >= 0.
        eps: added to the denominator, > 0.
        precision: least precision of products: ``"bf16"``, ``"tf32"``, ``"ieee"`` (or 0, 1, 2). None: bf16 for 16-bit
            qkv, ieee otherwise. ``impl="torch"`` computes in fp32 whatever is asked, fp64 for fp64.
        impl: ``"auto"`` takes Triton for CUDA tensors of at most 32 bits and torch for all others; ``"torch"``,
            ``"triton"``. Triton that cannot run raises; nothing falls back.

    Returns:
        FrameGDNResult: ``output [B, N, H, D]`` in the dtype of qkv, ``final_state`` in fp32 (fp64) or None.

    Raises:
        ValueError: A shape, dtype, device or value is wrong; the message names argument, rule and what came.
        TypeError: An argument is of the wrong Python type.
        NotImplementedError: Triton with D above 256, fp64 or tensors that are not on a GPU; use ``impl="torch"``.

    Cost: 8 S D^2 flops of products per frame and head and 2 D^3 more for each direction, twice that backward; F
        dependent steps. No host synchronisation. Triton saves, besides its inputs and the output, states and operators
        of every frame (``4 D^2`` numbers per frame and head) and three numbers per token and head; its backward
        allocates dqkv and nothing else of that size; a second backward through it raises NotImplementedError.
    Determinism: Triton repeats bit by bit; torch as the products it calls.
    Source: the frame-wise rule of SANA-WM, which takes the gated delta rule (Yang, Kautz and Hatamizadeh, Gated Delta
        Networks, 2024) from tokens to frames.

    Example:
        >>> result = frame_gdn(torch.rand(1, 6, 3, 2, 4), torch.rand(1, 2, 3, 2), torch.rand(1, 2, 3))
        >>> result.output.shape
        torch.Size([1, 6, 2, 4])
    """
    inputs, options, entry = frame_gdn_arguments(
        qkv, beta, decay, rope, q_norm_weight, k_norm_weight, k_scale, direction, chunk_starts, frame_valid,
        initial_state, output_final_state, norm_eps, checks.require_positive("eps", eps), precision, impl, divide=True,
    )  # fmt: skip
    output, _, exit_states = stages.apply(inputs, options, entry, want_exit=output_final_state)
    return FrameGDNResult(output, final_frame_state(exit_states, output_final_state))


def frame_gdn_raw(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    rope: RotaryTables | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    k_scale: float = 1.0,
    direction: Direction | str = Direction.FORWARD,
    chunk_starts: Sequence[int] | None = None,
    frame_valid: Tensor | None = None,
    initial_state: FrameState | None = None,
    output_final_state: bool = False,
    norm_eps: float = 1e-5,
    precision: Precision | str | int | None = None,
    impl: Impl | str = Impl.AUTO,
) -> FrameGDNRawResult:
    """Return what `frame_gdn` divides: ``numerator = qr_f kv_f`` and ``denominator = q_f z_f``.

    For callers that add other branches before the division. Arguments, errors and cost are those of `frame_gdn`.

    Returns:
        FrameGDNRawResult: ``numerator [B, N, H, D]`` and ``denominator [B, H, N]``, fp32 (fp64 for fp64 qkv), and
        ``final_state`` or None.

    Example:
        >>> raw = frame_gdn_raw(torch.rand(1, 6, 3, 2, 4), torch.rand(1, 2, 3, 2), torch.rand(1, 2, 3))
        >>> raw.numerator.shape, raw.denominator.shape
        (torch.Size([1, 6, 2, 4]), torch.Size([1, 2, 6]))
    """
    inputs, options, entry = frame_gdn_arguments(
        qkv, beta, decay, rope, q_norm_weight, k_norm_weight, k_scale, direction, chunk_starts, frame_valid,
        initial_state, output_final_state, norm_eps, 0.0, precision, impl, divide=False,
    )  # fmt: skip
    numerator, denominator, exit_states = stages.apply(inputs, options, entry, want_exit=output_final_state)
    assert denominator is not None
    return FrameGDNRawResult(numerator, denominator, final_frame_state(exit_states, output_final_state))


def frame_gdn_numerator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    direction: Direction | str = Direction.FORWARD,
    chunk_starts: Sequence[int] | None = None,
    frame_valid: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    precision: Precision | str | int | None = None,
    impl: Impl | str = Impl.AUTO,
) -> FrameGDNNumeratorResult:
    """Run the kv stream alone on prepared operands: no norm, ReLU, scale, rotation, z stream or division.

        kv_f = decay_f (I - k_f' diag(beta_f) k_f) kv_{f-1} + k_f' diag(beta_f) v_f;    numerator_f = q_f kv_f

    This is the camera branch's operator. Options, errors and cost are those of `frame_gdn`.

    Args:
        q: ``[B, N, H, D]``, fp16, bf16, fp32 or fp64, any strides.
        k: the same, in the dtype of q.
        v: the same, in the dtype of q.
        beta: ``[B, H, F, S]``, as in `frame_gdn`.
        decay: ``[B, H, F]``, as in `frame_gdn`.
        direction: as in `frame_gdn`.
        chunk_starts: as in `frame_gdn`.
        frame_valid: as in `frame_gdn`.
        initial_state: ``kv [B, H, D, D]``, key-first, fp32 (fp64 for fp64 q).
        output_final_state: as in `frame_gdn`.
        precision: as in `frame_gdn`.
        impl: as in `frame_gdn`.

    Returns:
        FrameGDNNumeratorResult: ``numerator [B, N, H, D]`` fp32 (fp64), ``final_state`` ``[B, H, D, D]`` or None.

    Example:
        >>> q, k, v = torch.rand(3, 1, 6, 2, 4).unbind(0)
        >>> frame_gdn_numerator(q, k, v, torch.rand(1, 2, 3, 2), torch.rand(1, 2, 3)).numerator.shape
        torch.Size([1, 6, 2, 4])
    """
    inputs, options, entry = numerator_arguments(
        q, k, v, beta, decay, direction, chunk_starts, frame_valid, initial_state, output_final_state, precision, impl
    )
    numerator, _, exit_states = stages.apply(inputs, options, entry, want_exit=output_final_state)
    return FrameGDNNumeratorResult(numerator, exit_states.forward_kv if output_final_state else None)


def frame_gdn_arguments(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    rope: RotaryTables | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    k_scale: float,
    direction: Direction | str,
    chunk_starts: Sequence[int] | None,
    frame_valid: Tensor | None,
    initial_state: FrameState | None,
    output_final_state: bool,
    norm_eps: float,
    eps: float,
    precision: Precision | str | int | None,
    impl: Impl | str,
    *,
    divide: bool,
) -> tuple[FrameInputs, FrameOptions, FrameBoundary]:
    """Check the arguments of `frame_gdn` and `frame_gdn_raw`; return them as the stages take them."""
    checks.require_rank("qkv", qkv, "B, N, 3, H, D")
    checks.require_dtype("qkv", qkv, checks.FLOATING)
    batch, tokens, three, heads, width = qkv.shape
    if three != 3 or heads < 1 or width < 1:
        raise ValueError(f"qkv must have shape [B, N, 3, H, D] with H, D >= 1, got {list(qkv.shape)}")
    frames = _check_gates(beta, decay, frame_valid, batch, tokens, heads, qkv.device, "qkv")
    cos, sin = _check_rope(rope, tokens, width, qkv.device)
    weights = [
        _check_weight(name, weight, heads, width, qkv.device)
        for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight))
    ]
    options = _options(
        qkv, frames, direction, chunk_starts, initial_state is not None, output_final_state, precision, impl,
        features=True, has_z=True, divide=divide, k_scale=checks.require_positive("k_scale", k_scale),
        norm_eps=checks.require_non_negative("norm_eps", norm_eps), eps=eps,
    )  # fmt: skip
    inputs = FrameInputs(qkv, None, None, None, beta, decay, weights[0], weights[1], cos, sin, frame_valid)
    if initial_state is not None:
        dtype = inputs.state_dtype
        checks.require_frame_state("initial_state", initial_state, batch, heads, width, dtype, qkv.device)
    kv, z = (None, None) if initial_state is None else initial_state
    return inputs, options, FrameBoundary(kv, z, None, None)


def numerator_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    direction: Direction | str,
    chunk_starts: Sequence[int] | None,
    frame_valid: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    precision: Precision | str | int | None,
    impl: Impl | str,
) -> tuple[FrameInputs, FrameOptions, FrameBoundary]:
    """Check the arguments of `frame_gdn_numerator`; return them as the stages take them."""
    checks.require_rank("q", q, "B, N, H, D")
    checks.require_dtype("q", q, checks.FLOATING)
    batch, tokens, heads, width = q.shape
    if heads < 1 or width < 1:
        raise ValueError(f"q must have shape [B, N, H, D] with H, D >= 1, got {list(q.shape)}")
    for name, operand in (("k", k), ("v", v)):
        checks.require_shape(name, operand, "B, N, H, D", q.shape)
        checks.require_dtype(name, operand, (q.dtype,))
        checks.require_device(name, operand, q.device, "q")
    frames = _check_gates(beta, decay, frame_valid, batch, tokens, heads, q.device, "q")
    options = _options(
        q, frames, direction, chunk_starts, initial_state is not None, output_final_state, precision, impl,
        features=False, has_z=False, divide=False, k_scale=1.0, norm_eps=0.0, eps=0.0,
    )  # fmt: skip
    inputs = FrameInputs(None, q, k, v, beta, decay, None, None, None, None, frame_valid)
    if initial_state is not None:
        shape = (batch, heads, width, width)
        checks.require_state("initial_state", initial_state, "B, H, D, D", shape, inputs.state_dtype, q.device)
    return inputs, options, FrameBoundary(initial_state, None, None, None)


def final_frame_state(exit_states: FrameBoundary, wanted: bool) -> FrameState | None:
    """Return the forward exit as the public state, or None."""
    if not wanted:
        return None
    assert exit_states.forward_kv is not None
    assert exit_states.forward_z is not None
    return FrameState(exit_states.forward_kv, exit_states.forward_z)


def _options(
    operand: Tensor,
    frames: int,
    direction: Direction | str,
    chunk_starts: Sequence[int] | None,
    has_state: bool,
    output_final_state: bool,
    precision: Precision | str | int | None,
    impl: Impl | str,
    *,
    features: bool,
    has_z: bool,
    divide: bool,
    k_scale: float,
    norm_eps: float,
    eps: float,
) -> FrameOptions:
    resolved = checks.as_direction(direction)
    if resolved is Direction.REVERSE and (has_state or output_final_state):
        given = "initial_state" if has_state else "output_final_state"
        raise ValueError(f'{given} needs the forward scan, which direction="reverse" does not run')
    resets = checks.as_chunk_starts(chunk_starts, frames) if resolved.reads_future else ()
    if chunk_starts is not None and not resolved.reads_future:
        checks.as_chunk_starts(chunk_starts, frames)
    return FrameOptions(
        features, has_z, divide, resolved, resets, k_scale, norm_eps, eps,
        checks.as_precision(precision, operand.dtype), _resolve_impl(impl, operand),
    )  # fmt: skip


def _resolve_impl(impl: Impl | str, operand: Tensor) -> Impl:
    """Return torch or triton; raise NotImplementedError, with the reason, if Triton is meant and cannot run."""
    wanted = checks.as_impl(impl)
    if wanted is Impl.AUTO:
        wanted = Impl.TRITON if operand.is_cuda and operand.dtype != torch.float64 else Impl.TORCH
    if wanted is Impl.TRITON:
        width, reason = operand.shape[-1], None
        if operand.dtype == torch.float64:
            reason = "supports fp16, bf16 and fp32, got float64"
        elif width > WIDEST_TRITON_HEAD:
            reason = f"supports D up to {WIDEST_TRITON_HEAD}, got D = {width}"
        elif not operand.is_cuda and not os.environ.get("TRITON_INTERPRET"):
            reason = f"needs tensors on a GPU, got {operand.device}"
        elif not _HAS_TRITON:
            reason = "needs the package triton, which is not installed"
        if reason is not None:
            raise NotImplementedError(f'impl="triton" {reason}; use impl="torch"')
    return wanted


def _check_gates(
    beta: Tensor,
    decay: Tensor,
    frame_valid: Tensor | None,
    batch: int,
    tokens: int,
    heads: int,
    device: torch.device,
    owner: str,
) -> int:
    """Check beta, decay and the mask against the operand they belong to; return the number of frames."""
    checks.require_rank("beta", beta, "B, H, F, S")
    frames, spatial = beta.shape[2:]
    checks.require_shape("beta", beta, "B, H, F, S", (batch, heads, frames, spatial))
    checks.require_shape("decay", decay, "B, H, F", (batch, heads, frames))
    if frames * spatial != tokens:
        raise ValueError(f"{owner} must have N = F*S = {frames}*{spatial} = {frames * spatial} tokens, got {tokens}")
    for name, gate in (("beta", beta), ("decay", decay)):
        checks.require_dtype(name, gate, checks.FLOATING)
        checks.require_device(name, gate, device, owner)
    if frame_valid is not None:
        checks.require_shape("frame_valid", frame_valid, "B, F", (batch, frames))
        checks.require_dtype("frame_valid", frame_valid, (torch.bool, *checks.FLOATING))
        checks.require_device("frame_valid", frame_valid, device, owner)
        if frame_valid.requires_grad:
            raise ValueError("frame_valid must not require a gradient")
    return frames


def _check_rope(
    rope: RotaryTables | None, tokens: int, width: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if rope is None:
        return None, None
    if not isinstance(rope, tuple) or len(rope) != 2:
        raise TypeError(f"rope must be RotaryTables(cos, sin), got {type(rope).__name__}")
    if width % 2:
        raise ValueError(f"rope needs an even head width, got D = {width}")
    for name, table in zip(("rope.cos", "rope.sin"), rope, strict=True):
        checks.require_shape(name, table, "N, D/2", (tokens, width // 2))
        checks.require_dtype(name, table, (torch.float32, torch.float64))
        checks.require_device(name, table, device, "qkv")
        if table.requires_grad:
            raise ValueError(f"{name} must not require a gradient")
    return rope[0], rope[1]


def _check_weight(name: str, weight: Tensor | None, heads: int, width: int, device: torch.device) -> Tensor | None:
    if weight is None:
        return None
    checks.require_tensor(name, weight)
    if tuple(weight.shape) not in ((heads * width,), (heads, width)):
        raise ValueError(f"{name} must have shape [H*D] = [{heads * width}], got {list(weight.shape)}")
    checks.require_dtype(name, weight, checks.FLOATING)
    checks.require_device(name, weight, device, "qkv")
    return weight.reshape(heads, width)
