"""The recurrence one token at a time: the independent oracle of the package's own reference.

It shares no code and no formula with the package. Where the package multiplies states by ``I - P``, this forgets,
measures each token's error against the state as it stands, and writes all tokens. Reset, mask and reverse direction
are what they mean rather than how they are computed: a chunk is a clip of its own for the reverse scan, an invalid
frame is taken out of the clip, and the reverse scan is the forward scan of a flipped clip whose writes come one frame
late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Frame(NamedTuple):
    """One head's tokens of one frame: queries and keys before and after rotation, values, gates; rows are tokens."""

    q: Tensor
    qr: Tensor
    k: Tensor
    kr: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor


class State(NamedTuple):
    """``kv [D, D]`` and ``z [D]`` of one head."""

    kv: Tensor
    z: Tensor


class SequentialResult(NamedTuple):
    """``numerator [B, N, H, D]``, ``denominator [B, H, N]``; exit states ``[B, H, D, D]`` and ``[B, H, D]``."""

    numerator: Tensor
    denominator: Tensor
    forward_kv: Tensor
    forward_z: Tensor
    reverse_kv: Tensor
    reverse_z: Tensor


def prepare(x: Tensor, weight: Tensor | None, norm_eps: float | None, scale: float, features: bool) -> Tensor:
    """Normalise over all channels of a token (unless ``norm_eps`` is None), weigh, cut below zero, scale."""
    if not features:
        return x
    if norm_eps is not None:
        energy = torch.einsum("bnhd,bnhd->bn", x, x) / (x.shape[2] * x.shape[3])
        x = x / torch.sqrt(energy + norm_eps)[:, :, None, None]
    if weight is not None:
        x = torch.einsum("bnhd,hd->bnhd", x, weight)
    return scale * torch.where(x > 0, x, torch.zeros_like(x))


def turn(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Multiply neighbouring channels, as one complex number, by the unit number of the token's angle."""
    if cos is None or sin is None:
        return x
    numbers = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.complex(cos, sin).to(x.dtype.to_complex())[:, None]
    return torch.view_as_real(numbers).reshape(x.shape)


def scan(frames: Sequence[Frame], state: State) -> tuple[list[Tensor], list[Tensor], State]:
    """Forget, measure all errors, write all tokens, read; return numerators, denominators and the last state."""
    numerators, denominators = [], []
    for q, qr, k, kr, v, beta, decay in frames:
        kv, z = state.kv * decay, state.z * decay
        misses = [(b * (value - key @ kv), b * (1 - plain @ z)) for key, plain, value, b in zip(kr, k, v, beta)]
        for key, plain, (miss_kv, miss_z) in zip(kr, k, misses):
            kv, z = kv + torch.outer(key, miss_kv), z + plain * miss_z
        numerators.append(torch.stack([token @ kv for token in qr]) if len(qr) else torch.zeros_like(v))
        denominators.append(torch.stack([token @ z for token in q]) if len(q) else torch.zeros_like(beta))
        state = State(kv, z)
    return numerators, denominators, state


def reverse_scan(frames: Sequence[Frame], state: State) -> tuple[list[Tensor], list[Tensor], State]:
    """Scan the flipped clip with its writes one frame late; the last state has frame 0 written too."""
    flipped = list(frames[::-1])
    nothing = [torch.zeros_like(x) for x in flipped[0][2:6]] + [torch.ones_like(flipped[0].decay)]
    writes = [nothing, *(list(frame[2:]) for frame in flipped)]
    late = [Frame(frame.q, frame.qr, *write) for frame, write in zip(flipped, writes)]
    numerators, denominators, state = scan(late, state)
    silent = Frame(flipped[-1].q[:0], flipped[-1].qr[:0], *writes[-1])
    return numerators[::-1], denominators[::-1], scan([silent], state)[2]


def sequential_frame_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    direction: str,
    features: bool = True,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    k_scale: float = 1.0,
    chunk_starts: Sequence[int] = (),
    frame_valid: Tensor | None = None,
    forward: tuple[Tensor, Tensor] | None = None,
    reverse: tuple[Tensor, Tensor] | None = None,
) -> SequentialResult:
    """Run every head of every clip on its own.

    ``q, k, v [B, N, H, D]``, ``beta [B, H, F, S]``, ``decay [B, H, F]``, ``cos, sin [N, D/2]``, weights ``[H, D]``.
    ``forward`` and ``reverse`` are the states before the first frame and after the last, zeros if None. Frame 0 counts
    as an interior chunk start if ``chunk_starts`` lists it: that zeroes the reverse exit.
    """
    batch, tokens, heads, width = q.shape
    frames, spatial = beta.shape[2:]
    q, k = prepare(q, q_norm_weight, norm_eps, 1.0, features), prepare(k, k_norm_weight, norm_eps, k_scale, features)
    qr, kr = turn(q, cos, sin), turn(k, cos, sin)
    starts = sorted({0, *chunk_starts})
    chunks = [range(a, b) for a, b in zip(starts, [*starts[1:], frames])]
    numerator, denominator = {}, {}
    exits = []
    for b in range(batch):
        valid = [f for f in range(frames) if frame_valid is None or bool(frame_valid[b, f])]
        for h in range(heads):
            rows = {f: slice(f * spatial, (f + 1) * spatial) for f in valid}
            clip = {
                f: Frame(*(x[b, rows[f], h] for x in (q, qr, k, kr, v)), beta[b, h, f], decay[b, h, f]) for f in valid
            }
            for f in range(frames):
                numerator[b, f, h], denominator[b, h, f] = q.new_zeros(spatial, width), q.new_zeros(spatial)
            empty = State(q.new_zeros(width, width), q.new_zeros(width))
            after, before = (State(s[0][b, h], s[1][b, h]) if s is not None else empty for s in (forward, reverse))
            runs = []
            if direction != "reverse":
                *reads, after = scan([clip[f] for f in valid], after)
                runs.append((valid, reads))
            if direction != "forward":
                for chunk in reversed(chunks):
                    present = [f for f in chunk if f in clip]
                    if present:
                        *reads, before = reverse_scan([clip[f] for f in present], before)
                        runs.append((present, reads))
                    if chunk.start in chunk_starts:
                        before = empty
            for present, reads in runs:
                for f, num, den in zip(present, *reads):
                    numerator[b, f, h], denominator[b, h, f] = numerator[b, f, h] + num, denominator[b, h, f] + den
            exits.append((*after, *before))
    rows_of = [torch.stack([numerator[b, f, h] for h in range(heads)], 1) for b in range(batch) for f in range(frames)]
    dens_of = [denominator[b, h, f] for b in range(batch) for h in range(heads) for f in range(frames)]
    states = [torch.stack(x).unflatten(0, (batch, heads)) for x in zip(*exits)]
    return SequentialResult(
        torch.cat(rows_of).reshape(batch, tokens, heads, width) if rows_of else torch.zeros_like(q),
        torch.cat(dens_of).reshape(batch, heads, tokens) if dens_of else q.new_zeros(batch, heads, tokens),
        *states,
    )
