"""The backward of a run of frames by hand, phase by phase: what kernels must compute, in plain torch.

Every function is one phase of one direction of differentiation and holds its equations once. Layouts inside are
``[B, H, F, S, D]`` for tokens and ``[B, H, F, D, E]`` for whatever belongs to a frame, with E = D columns in the kv
stream and E = 1 in the z stream, which obey the same equations. No autograd.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions


class Features(NamedTuple):
    """What enters the recurrence. ``rho_q, rho_k [B, F, S]`` are None without normalisation."""

    q: Tensor
    qr: Tensor
    k: Tensor
    kr: Tensor
    v: Tensor
    rho_q: Tensor | None
    rho_k: Tensor | None


class Histories(NamedTuple):
    """Forward state ``before`` and ``after`` every frame, and the reverse state it reads, of the ``later`` frames.

    Zero for a direction that takes no part. The exits are the two states that leave the run.
    """

    before: Tensor
    after: Tensor
    later: Tensor
    exit_forward: Tensor
    exit_reverse: Tensor


class ScanGradients(NamedTuple):
    """Gradients of one stream's operators, of the decay through it, and of the two entry states."""

    dp: Tensor
    da: Tensor
    ddecay: Tensor
    dforward: Tensor
    dreverse: Tensor


class Forward(NamedTuple):
    """Result and exits of a run; ``denominator`` is None without the z stream."""

    result: Tensor
    denominator: Tensor | None
    exits: FrameBoundary


def rotate(x: Tensor, inputs: FrameInputs, sign: float) -> Tensor:
    """Turn pairs of ``x [B, H, F, S, D]`` by ``sign`` times the angle; the adjoint of +1 is -1."""
    if inputs.rope_cos is None or inputs.rope_sin is None:
        return x
    shape = (*x.shape[2:4], -1)
    cos, sin = inputs.rope_cos.to(x.dtype).reshape(shape), sign * inputs.rope_sin.to(x.dtype).reshape(shape)
    y = torch.empty_like(x)
    y[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    y[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return y


def frame_major(x: Tensor, inputs: FrameInputs) -> Tensor:
    """``[B, N, H, D]`` to ``[B, H, F, S, D]`` in the state dtype."""
    batch, _, heads, width = x.shape
    return x.to(inputs.state_dtype).reshape(batch, *inputs.beta.shape[2:], heads, width).permute(0, 3, 1, 2, 4)


def token_major(x: Tensor) -> Tensor:
    """``[B, H, F, S, D]`` to ``[B, N, H, D]``."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)


def normalises(inputs: FrameInputs, options: FrameOptions) -> bool:
    """Tell whether RMSNorm applies: features are made here and at least one weight is given."""
    return options.features and not (inputs.q_norm_weight is None and inputs.k_norm_weight is None)


def weigh(x: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply ``x [B, H, F, S, D]`` by ``weight [H, D]``, 1 if None."""
    return x if weight is None else x * weight.to(x.dtype)[None, :, None, None, :]


def qk_norm(inputs: FrameInputs, options: FrameOptions) -> Features:
    """rho = (mean x^2 + norm_eps)^(-1/2);  q = ReLU(w rho x),  k = k_scale ReLU(w rho x);  rotated copies."""
    x_q, x_k, v = (frame_major(x, inputs) for x in inputs.operands())
    rho_q = rho_k = None
    if not options.features:
        return Features(x_q, x_q, x_k, x_k, v, None, None)
    if normalises(inputs, options):
        rho_q, rho_k = ((x.square().mean((1, 4)) + options.norm_eps) ** -0.5 for x in (x_q, x_k))
        x_q = weigh(x_q * rho_q[:, None, :, :, None], inputs.q_norm_weight)
        x_k = weigh(x_k * rho_k[:, None, :, :, None], inputs.k_norm_weight)
    q, k = x_q.clamp(min=0), options.k_scale * x_k.clamp(min=0)
    return Features(q, rotate(q, inputs, 1.0), k, rotate(k, inputs, 1.0), v, rho_q, rho_k)


def gates(inputs: FrameInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """beta <- beta v,  decay <- decay v + 1 - v;  also return v as ``[B, 1, F, 1]`` or None."""
    beta, decay = inputs.beta.to(inputs.state_dtype), inputs.decay.to(inputs.state_dtype)
    if inputs.frame_valid is None:
        return beta, decay, None
    valid = inputs.frame_valid.to(inputs.state_dtype)[:, None, :, None]
    return beta * valid, decay * valid[..., 0] + 1 - valid[..., 0], valid


def phase_a(k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """P = K' diag(beta) K,  A = K' diag(beta) V."""
    written = k.mT * beta.unsqueeze(-2)
    return written @ k, written @ v


def phase_b(
    p: Tensor, a: Tensor, decay: Tensor, options: FrameOptions, forward: Tensor | None, reverse: Tensor | None
) -> Histories:
    """M <- g (M - P M) + A, forward and in reverse; a reset frame hands zero to the frame before it."""
    before, after, later = torch.zeros_like(a), torch.zeros_like(a), torch.zeros_like(a)
    empty = a.new_zeros(*a.shape[:2], *a.shape[3:])
    state = empty if forward is None else forward
    if options.direction.reads_past:
        for f in range(a.shape[2]):
            before[:, :, f] = state
            state = decay[:, :, f, None, None] * (state - p[:, :, f] @ state) + a[:, :, f]
            after[:, :, f] = state
    exit_forward, state = state, empty if reverse is None else reverse
    if options.direction.reads_future:
        for f in reversed(range(a.shape[2])):
            later[:, :, f] = state
            state = decay[:, :, f, None, None] * (state - p[:, :, f] @ state) + a[:, :, f]
            if f in options.resets:
                state = empty
    return Histories(before, after, later, exit_forward, state)


def phase_c_bwd(q: Tensor, states: Histories, dread: Tensor) -> tuple[Tensor, Tensor]:
    """Of num = Q M:  dQ = dnum M',  C = Q' dnum, the gradient that a state gets from being read."""
    return dread @ (states.after + states.later).mT, q.mT @ dread


def phase_b_bwd(
    p: Tensor,
    decay: Tensor,
    options: FrameOptions,
    states: Histories,
    c: Tensor,
    dexit_forward: Tensor | None,
    dexit_reverse: Tensor | None,
) -> ScanGradients:
    """Sweep both scans against their order.

    Forward, from the last frame:  L_f = C_f + g_{f+1} (I - P_{f+1})' L_{f+1}  with the exit's gradient beyond the last.
    Reverse, from the first frame: y_f = 0 at a reset, else the gradient of what frame f - 1 reads;
    L_f = C_f + g_f (I - P_f)' y_f.
    Either adds to its frame's operators, from x = L_f, M = before_f or x = y_f, M = later_f:
    dA_f += x,  dP_f -= g_f x M',  dg_f += <x, (I - P_f) M>.
    """
    dp, da, ddecay = torch.zeros_like(p), torch.zeros_like(c), torch.zeros_like(decay)
    frames = range(p.shape[2])
    empty = c.new_zeros(*c.shape[:2], *c.shape[3:])

    def write(f: int, x: Tensor, state: Tensor) -> None:
        da[:, :, f] += x
        dp[:, :, f] -= decay[:, :, f, None, None] * (x @ state.mT)
        ddecay[:, :, f] += (x * (state - p[:, :, f] @ state)).sum((-2, -1))

    def back(f: int, x: Tensor) -> Tensor:
        return decay[:, :, f, None, None] * (x - p[:, :, f].mT @ x)

    dforward = empty if dexit_forward is None else dexit_forward
    if options.direction.reads_past:
        for f in reversed(frames):
            total = c[:, :, f] + dforward
            write(f, total, states.before[:, :, f])
            dforward = back(f, total)
    dreverse = empty if dexit_reverse is None else dexit_reverse
    if options.direction.reads_future:
        for f in frames:
            arrived = empty if f in options.resets else dreverse
            write(f, arrived, states.later[:, :, f])
            dreverse = c[:, :, f] + back(f, arrived)
    return ScanGradients(dp, da, ddecay, dforward, dreverse)


def phase_a_bwd(k: Tensor, v: Tensor, beta: Tensor, dp: Tensor, da: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dK = beta (K (dP + dP') + V dA'),  dV = beta (K dA),  dbeta_s = k_s dP k_s' + k_s dA v_s'."""
    dk = beta[..., None] * (k @ (dp + dp.mT) + v @ da.mT)
    dbeta = ((k @ dp) * k).sum(-1) + ((k @ da) * v).sum(-1)
    return dk, beta[..., None] * (k @ da), dbeta


def qk_norm_bwd(x: Tensor, dy: Tensor, rho: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of y = w rho x: p = w dy, t = sum over all H*D channels of p x, dx = rho p - rho^3 / C t x, dw = sum rho dy x."""
    if rho is None:
        return dy, None
    rho = rho[:, None, :, :, None]
    p = weigh(dy, weight)
    per_head = (p * x).sum(-1, keepdim=True)  # all that a program owning one head can know of t
    t = per_head.sum(1, keepdim=True)
    dw = None if weight is None else (rho * dy * x).sum((0, 2, 3))
    return rho * p - rho**3 / (x.shape[1] * x.shape[4]) * t * x, dw


def forward_by_phases(inputs: FrameInputs, options: FrameOptions, entry: FrameBoundary) -> Forward:
    """Run the phases; return what the backward may keep: the result and one denominator per token and head."""
    x = qk_norm(inputs, options)
    beta, decay, valid = gates(inputs)
    kv = phase_b(*phase_a(x.kr, x.v, beta), decay, options, entry.forward_kv, entry.reverse_kv)
    result = x.qr @ (kv.after + kv.later)
    result = result if valid is None else result * valid[..., None]
    denominator, z_exits = None, (None, None)
    if options.has_z:
        ones = torch.ones_like(beta)[..., None]
        z = phase_b(*phase_a(x.k, ones, beta), decay, options, column(entry.forward_z), column(entry.reverse_z))
        denominator = (x.q @ (z.after + z.later))[..., 0]
        denominator = denominator if valid is None else denominator * valid
        z_exits = (z.exit_forward[..., 0], z.exit_reverse[..., 0])
    if options.divide:
        assert denominator is not None
        result = result / (denominator + options.eps)[..., None]
    past, future = options.direction.reads_past, options.direction.reads_future
    exits = FrameBoundary(
        kv.exit_forward if past else None, z_exits[0] if past else None,
        kv.exit_reverse if future else None, z_exits[1] if future else None,
    )  # fmt: skip
    return Forward(token_major(result), None if denominator is None else denominator.flatten(2), exits)


def backward_by_phases(
    inputs: FrameInputs,
    options: FrameOptions,
    entry: FrameBoundary,
    saved: Forward,
    dresult: Tensor,
    ddenominator: Tensor | None,
    exit_gradient: FrameBoundary,
) -> tuple[FrameInputs, FrameBoundary]:
    """Return the gradients of all inputs and of the entry states.

    With ``options.divide`` neither numerator nor ``ddenominator`` is needed: dnum = dout / (den + eps) and
    dden = -rowsum(dout out) / (den + eps), from the saved output and denominator.
    """
    x = qk_norm(inputs, options)
    beta, decay, valid = gates(inputs)
    dnum = frame_major(dresult, inputs)
    dden = torch.zeros_like(beta) if ddenominator is None else ddenominator.to(beta.dtype).reshape(beta.shape)
    if options.divide:
        assert saved.denominator is not None
        dnum = dnum / (saved.denominator.reshape(beta.shape) + options.eps)[..., None]
        dden = -(dnum * frame_major(saved.result, inputs)).sum(-1)
    if valid is not None:
        dnum, dden = dnum * valid[..., None], dden * valid

    p, a = phase_a(x.kr, x.v, beta)
    states = phase_b(p, a, decay, options, entry.forward_kv, entry.reverse_kv)
    dqr, c = phase_c_bwd(x.qr, states, dnum)
    kv = phase_b_bwd(p, decay, options, states, c, exit_gradient.forward_kv, exit_gradient.reverse_kv)
    dkr, dv, dbeta = phase_a_bwd(x.kr, x.v, beta, kv.dp, kv.da)
    ddecay, dentry = kv.ddecay, [kv.dforward, None, kv.dreverse, None]
    dq, dk = rotate(dqr, inputs, -1.0), rotate(dkr, inputs, -1.0)
    if options.has_z:
        ones = torch.ones_like(beta)[..., None]
        p, b = phase_a(x.k, ones, beta)
        states = phase_b(p, b, decay, options, column(entry.forward_z), column(entry.reverse_z))
        from_read, c = phase_c_bwd(x.q, states, dden[..., None])
        dexits = (column(exit_gradient.forward_z), column(exit_gradient.reverse_z))
        z = phase_b_bwd(p, decay, options, states, c, *dexits)
        from_write, _, dbeta_z = phase_a_bwd(x.k, ones, beta, z.dp, z.da)
        dq, dk, dbeta, ddecay = dq + from_read, dk + from_write, dbeta + dbeta_z, ddecay + z.ddecay
        dentry[1], dentry[3] = z.dforward[..., 0], z.dreverse[..., 0]

    dq_weight = dk_weight = None
    if options.features:
        x_q, x_k, _ = (frame_major(operand, inputs) for operand in inputs.operands())
        dq, dk = dq * (x.q > 0), options.k_scale * dk * (x.k > 0)
        dq, dq_weight = qk_norm_bwd(x_q, dq, x.rho_q, inputs.q_norm_weight)
        dk, dk_weight = qk_norm_bwd(x_k, dk, x.rho_k, inputs.k_norm_weight)
    if valid is not None:
        dbeta, ddecay = dbeta * valid, ddecay * valid[..., 0]
    operands = [token_major(gradient) for gradient in (dq, dk, dv)]
    packed = [torch.stack(operands, 2), None, None, None] if inputs.qkv is not None else [None, *operands]
    found = FrameInputs(*packed, dbeta, ddecay, dq_weight, dk_weight, None, None, None)
    kept = [gradient if state is not None else None for gradient, state in zip(dentry, entry, strict=True)]
    return FrameInputs(*(cast(g, like) for g, like in zip(found, inputs, strict=True))), FrameBoundary(*kept)


def column(z: Tensor | None) -> Tensor | None:
    """A vector state as the matrix with one column that the phases take."""
    return None if z is None else z[..., None]


def cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient has the dtype of its input."""
    return None if gradient is None or like is None else gradient.to(like.dtype)
