"""Frame-wise gated delta network in plain torch, written as its equations read.

Letters: B batch, H heads, F frames, S tokens of a frame, D head width. Inside, tokens are ``[B, H, F, S, D]`` and
everything that has no order over frames is one batched product; only the two scans loop. The z stream is the kv stream
with one value column, so both go through the same scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_kernels.rope import RotaryTables, rotate
from gdn_kernels.types import (
    FrameBoundary,
    FrameInputs,
    FrameOptions,
    FrameSummary,
    FrameTransitions,
)


def frame_gdn_reference(
    inputs: FrameInputs, options: FrameOptions, entry: FrameBoundary
) -> tuple[Tensor, Tensor | None, FrameBoundary]:
    """Run one call seeded with ``entry``, differentiable in every floating input and entry state.

    Args:
        inputs: checked tensors.
        options: ``precision`` is a lower bound, which products in fp32 (fp64 for fp64 inputs) always meet.
        entry: states at the ends, in the state dtype; None is zero.

    Returns:
        Result ``[B, N, H, D]`` (the output in the operands' dtype if ``options.divide``, else the numerator in the
        state dtype), denominator ``[B, H, N]`` (None if divided by, or without z), and the exit states.

    Cost: F dependent products of D x D by D x D per head, direction and stream; autograd keeps a few tensors of qkv's
        size and the states of all frames.
    """
    with torch.autocast(inputs.beta.device.type, enabled=False):
        q, qr, k, kr, v = _features(inputs, options)
        beta, decay = _gates(inputs)
        transitions = frame_transitions(k if options.has_z else None, kr, v, beta)
        kv, z, exit_states = _scan_both(transitions, decay, options, entry)
        numerator = qr @ kv
        denominator = (q @ z).squeeze(-1) if z is not None else None
        if inputs.frame_valid is not None:
            valid = inputs.frame_valid.to(numerator.dtype)[:, None, :, None]
            numerator = numerator * valid[..., None]
            denominator = denominator * valid if denominator is not None else None
        if options.divide:
            assert denominator is not None
            result = (numerator / (denominator + options.eps)[..., None]).to(inputs.operands()[0].dtype)
        else:
            result = numerator
        raw = None if options.divide or denominator is None else denominator.flatten(2)
        return _token_major(result), raw, exit_states


def summarize_reference(inputs: FrameInputs, options: FrameOptions) -> FrameSummary:
    """Collapse the run to its affine maps. The empty run is the identity. Not differentiable.

    Cost: as the scans of `frame_gdn_reference`, with D more columns in each stream for the transition.
    """
    with torch.no_grad(), torch.autocast(inputs.beta.device.type, enabled=False):
        _, _, k, kr, v = _features(inputs, options)
        beta, decay = _gates(inputs)
        p_kv, a, p_z, b = frame_transitions(k if options.has_z else None, kr, v, beta)
        forward_kv = reverse_kv = forward_z = reverse_z = transition_z = None
        width = a.shape[-1]
        transition_kv, increment = _affine(p_kv, a, decay)
        if options.direction.reads_past:
            forward_kv = increment
        if options.direction.reads_future:
            reverse_kv = _reverse_scan(p_kv, a, decay, options.resets, a.new_zeros(*a.shape[:2], width, width))[1]
        if p_z is not None and b is not None:
            column = b[..., None]
            transition_z, increment = _affine(p_z, column, decay)
            if options.direction.reads_past:
                forward_z = increment.squeeze(-1)
            if options.direction.reads_future:
                zero = column.new_zeros(*column.shape[:2], width, 1)
                reverse_z = _reverse_scan(p_z, column, decay, options.resets, zero)[1].squeeze(-1)
        return FrameSummary(transition_kv, transition_z, FrameBoundary(forward_kv, forward_z, reverse_kv, reverse_z))


def frame_transitions(k: Tensor | None, kr: Tensor, v: Tensor, beta: Tensor) -> FrameTransitions:
    """Return the frame operators; ``k, kr, v [B, H, F, S, D]``, ``beta [B, H, F, S]``; k None leaves out the z stream.

    ``p = k' diag(beta) k`` is averaged with its transpose, which makes it symmetric to the last bit: the reverse
    transition of a run then is the transpose of the forward one.
    """
    p_kv, a = _write_operator(kr, beta), (kr * beta[..., None]).mT @ v
    if k is None:
        return FrameTransitions(p_kv, a, None, None)
    return FrameTransitions(p_kv, a, _write_operator(k, beta), (k * beta[..., None]).sum(-2))


def _write_operator(k: Tensor, beta: Tensor) -> Tensor:
    p = (k * beta[..., None]).mT @ k
    return (p + p.mT) * 0.5


def _features(inputs: FrameInputs, options: FrameOptions) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, rotated q, k, rotated k and v, each ``[B, H, F, S, D]`` in the state dtype."""
    q, k, v = (x.to(inputs.state_dtype).contiguous() for x in inputs.operands())  # results do not depend on strides
    if options.features:
        if inputs.q_norm_weight is not None or inputs.k_norm_weight is not None:
            q = rms_norm(q, inputs.q_norm_weight, options.norm_eps)
            k = rms_norm(k, inputs.k_norm_weight, options.norm_eps)
        q, k = torch.relu(q), torch.relu(k) * options.k_scale
    qr, kr = q, k
    if inputs.rope_cos is not None and inputs.rope_sin is not None:
        tables = RotaryTables(inputs.rope_cos, inputs.rope_sin)
        qr, kr = rotate(q, tables), rotate(k, tables)
    q, qr, k, kr, v = (_frame_major(x, *inputs.beta.shape[2:]) for x in (q, qr, k, kr, v))
    return q, qr, k, kr, v


def rms_norm(x: Tensor, weight: Tensor | None, norm_eps: float) -> Tensor:
    """Normalise over all channels of a token, heads included; ``x [B, N, H, D]``."""
    x = x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + norm_eps)
    return x if weight is None else x * weight.to(x.dtype)


def _gates(inputs: FrameInputs) -> tuple[Tensor, Tensor]:
    """Return beta and decay in the state dtype; an invalid frame writes nothing and forgets nothing."""
    beta, decay = inputs.beta.to(inputs.state_dtype), inputs.decay.to(inputs.state_dtype)
    if inputs.frame_valid is not None:
        valid = inputs.frame_valid.to(inputs.state_dtype)[:, None, :]
        beta, decay = beta * valid[..., None], decay * valid + (1 - valid)
    return beta, decay


def _scan_both(
    transitions: FrameTransitions, decay: Tensor, options: FrameOptions, entry: FrameBoundary
) -> tuple[Tensor, Tensor | None, FrameBoundary]:
    """Return the states that the frames read, ``[B, H, F, D, D]`` and ``[B, H, F, D, 1]`` or None, and the exits."""
    p_kv, a, p_z, b = transitions
    kv, forward_kv, reverse_kv = _scan_stream(p_kv, a, decay, options, entry.forward_kv, entry.reverse_kv)
    if p_z is None or b is None:
        return kv, None, FrameBoundary(forward_kv, None, reverse_kv, None)
    z, forward_z, reverse_z = _scan_stream(
        p_z, b[..., None], decay, options, _as_column(entry.forward_z), _as_column(entry.reverse_z)
    )
    return kv, z, FrameBoundary(forward_kv, _as_vector(forward_z), reverse_kv, _as_vector(reverse_z))


def _scan_stream(
    p: Tensor, a: Tensor, decay: Tensor, options: FrameOptions, forward: Tensor | None, reverse: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sum the histories of the directions in use; return the sum and the exit state of each."""
    total: Tensor | None = None
    zero = a.new_zeros(*a.shape[:2], *a.shape[3:])
    if options.direction.reads_past:
        total, forward = _forward_scan(p, a, decay, zero if forward is None else forward)
    if options.direction.reads_future:
        history, reverse = _reverse_scan(p, a, decay, options.resets, zero if reverse is None else reverse)
        total = history if total is None else total + history
    assert total is not None
    return total, forward, reverse


def _forward_scan(p: Tensor, a: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state after every frame, stacked on dim 2, and after the last: forget, then write."""
    history, entry = [], state
    for f in range(a.shape[2]):
        state = _step(p, a, decay, f, state)
        history.append(state)
    return _stack(history, p, a, decay, entry), state


def _reverse_scan(p: Tensor, a: Tensor, decay: Tensor, resets: tuple[int, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what every frame reads, stacked on dim 2, and the state once frame 0 is written too.

    A frame reads the frames after it only. The gate that acts on a step is that of the frame being written.
    """
    history, entry = [], state
    for f in reversed(range(a.shape[2])):
        history.append(state)
        state = torch.zeros_like(state) if f in resets else _step(p, a, decay, f, state)
    return _stack(history[::-1], p, a, decay, entry), state


def _step(p: Tensor, a: Tensor, decay: Tensor, f: int, state: Tensor) -> Tensor:
    return decay[:, :, f, None, None] * (state - p[:, :, f] @ state) + a[:, :, f]


def _affine(p: Tensor, a: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return transition and forward increment of all frames: one scan over the columns ``[increment | transition]``."""
    width = p.shape[-1]
    identity = torch.eye(width, dtype=a.dtype, device=a.device).expand(*a.shape[:2], width, width)
    state = torch.cat((a.new_zeros(*a.shape[:2], width, a.shape[-1]), identity), dim=-1)
    written = torch.nn.functional.pad(a, (0, width))
    for f in range(a.shape[2]):
        state = _step(p, written, decay, f, state)
    increment, transition = torch.split(state, [a.shape[-1], width], dim=-1)
    return transition.contiguous(), increment.contiguous()


def _stack(history: list[Tensor], p: Tensor, a: Tensor, decay: Tensor, entry: Tensor) -> Tensor:
    """Stack the history. One of no frames is in the graph of everything too, so that all get a gradient, of zeros."""
    if history:
        return torch.stack(history, dim=2)
    state = entry[:, :, None]
    return decay[..., None, None] * (state - p @ state) + a


def _as_column(z: Tensor | None) -> Tensor | None:
    return None if z is None else z[..., None]


def _as_vector(z: Tensor | None) -> Tensor | None:
    return None if z is None else z.squeeze(-1)


def _frame_major(x: Tensor, frames: int, spatial: int) -> Tensor:
    """``[B, N, H, D]`` to ``[B, H, F, S, D]``."""
    batch, _, heads, width = x.shape
    return x.reshape(batch, frames, spatial, heads, width).permute(0, 3, 1, 2, 4)


def _token_major(x: Tensor) -> Tensor:
    """``[B, H, F, S, D]`` to ``[B, N, H, D]``."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)
