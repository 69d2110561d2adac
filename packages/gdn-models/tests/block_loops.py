"""A block written as its equations read, with loops over frames: shares no code with the package or the operators.

Every function takes and returns plain tensors and is differentiated by autograd. It is slow and meant to be obvious.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def chunk_end(frame: int, starts: Sequence[int], total: int) -> int:
    """Return the first frame after the chunk of ``frame``."""
    return min([start for start in starts if start > frame] + [total])


def visible_ends(kind: str, starts: Sequence[int], total: int) -> list[int]:
    """Return for every frame the first frame that it does not see: ``kind`` is causal, bidirectional or chunks."""
    if kind == "causal":
        return [f + 1 for f in range(total)]
    return [chunk_end(f, starts if kind == "chunks" else (), total) for f in range(total)]


def conv_by_loops(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    """Convolve ``x [B, F, S, C]`` over frames with ``weight [C, 1, K]``, pair by pair."""
    taps = weight.shape[-1]
    rows = []
    for t in range(x.shape[1]):
        row = torch.zeros_like(x[:, 0])
        for s in range(x.shape[1]):
            if abs(t - s) < taps and s < ends[t]:
                row = row + x[:, s] * weight[:, 0, taps - 1 - abs(t - s)]
        rows.append(row)
    return torch.stack(rows, 1) if rows else x


def rotate_by_complex(x: Tensor, grid: tuple[int, int, int], theta: float, first: int) -> Tensor:
    """Rotate the interleaved pairs of ``x [B, N, H, D]`` by multiplying complex numbers of modulus one."""
    frames, rows, columns = grid
    width = x.shape[-1]
    space = 2 * (width // 6)
    factors = []
    for f in range(frames):
        for r in range(rows):
            for c in range(columns):
                for position, channels in ((first + f, width - 2 * space), (r, space), (c, space)):
                    for i in range(channels // 2):
                        angle = position * theta ** (-2 * i / channels)
                        # the package stores cosines and sines in fp32; so does this
                        factors.append(
                            complex(*torch.view_as_real(torch.tensor(cmath.exp(1j * angle)).cfloat()).tolist())
                        )
    table = torch.tensor(factors, dtype=torch.complex64).to(torch.complex128)  # tables are stored in fp32
    table = table.reshape(len(factors) * 2 // width, 1, width // 2)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], width // 2, 2))
    return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)


def read_by_loops(
    q: Tensor, k: Tensor, qr: Tensor, kr: Tensor, v: Tensor, beta: Tensor, decay: Tensor,
    ends: Sequence[int], valid: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return numerator ``[B, F, S, H, D]`` and denominator ``[B, F, S, H]``; q, k, v ``[B, F, S, H, D]``.

    Forget, then correct: ``X = g M``, error ``beta (V - K X)`` against the decayed state, ``M = X + K' error``. Frame f
    reads what the frames up to f left, oldest first, plus what the later frames it sees left, latest first.
    """
    batch, frames, _, heads, width = q.shape

    def write(state: Tensor, keys: Tensor, values: Tensor, b: int, f: int, h: int) -> Tensor:
        if not valid[b, f]:
            return state
        decayed = decay[b, h, f] * state
        error = beta[b, h, f][:, None] * (values - keys @ decayed)
        return decayed + keys.T @ error

    def walk(order: Sequence[int], b: int, h: int) -> tuple[Tensor, Tensor]:
        kv, z = q.new_zeros(width, width), q.new_zeros(width, 1)
        for f in order:
            kv = write(kv, kr[b, f, :, h], v[b, f, :, h], b, f, h)
            z = write(z, k[b, f, :, h], torch.ones_like(v[b, f, :, h, :1]), b, f, h)
        return kv, z

    numerators, denominators = [], []
    for b in range(batch):
        for f in range(frames):
            for h in range(heads):
                past, future = walk(range(f + 1), b, h), walk(range(ends[f] - 1, f, -1), b, h)
                numerators.append(qr[b, f, :, h] @ (past[0] + future[0]))
                denominators.append((q[b, f, :, h] @ (past[1] + future[1]))[:, 0])
    shape = (batch, frames, heads, q.shape[2])
    return (
        torch.stack(numerators).reshape(*shape, width).transpose(2, 3),
        torch.stack(denominators).reshape(shape).transpose(2, 3),
    )


def linear_by_einsum(p: Mapping[str, Tensor], name: str, y: Tensor) -> Tensor:
    """Apply the linear layer of this name, with its bias if it has one."""
    bias = p.get(f"{name}.bias")
    y = torch.einsum("...c,oc->...o", y, p[f"{name}.weight"])
    return y if bias is None else y + bias


def gates_by_loops(p: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return beta ``[B, H, F, S]`` and decay ``[B, H, F]`` of ``x [B, F, S, C]``."""
    beta = 1 / (1 + torch.exp(-linear_by_einsum(p, "beta_proj", x)))
    step = torch.log(1 + torch.exp(linear_by_einsum(p, "gate_proj", x.sum(2) / x.shape[2]) + p["dt_bias"]))
    return beta.permute(0, 3, 1, 2), torch.exp(-torch.exp(p["A_log"]) * step).permute(0, 2, 1)


def block_by_loops(
    p: Mapping[str, Tensor],
    x: Tensor,
    grid: tuple[int, int, int],
    *,
    heads: int,
    ends: Sequence[int],
    valid: Tensor | None = None,
    key_scale: float,
    norm_eps: float = 1e-5,
    eps: float = 1e-8,
    theta: float | None = 1e4,
    first: int = 0,
    raw: bool = False,
    added: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a block with the parameters ``p`` (state-dict keys); ``raw`` returns numerator and denominator instead.

    ``added [B, F, S, C]`` joins before the output gate.
    """
    batch, _, channels = x.shape
    frames, spatial, width = grid[0], grid[1] * grid[2], channels // heads
    valid = torch.ones(batch, frames, dtype=torch.bool) if valid is None else valid.bool()
    mask = valid.to(x.dtype)[:, :, None, None]
    x4 = x.reshape(batch, frames, spatial, channels) * mask

    def linear(name: str, y: Tensor) -> Tensor:
        return linear_by_einsum(p, name, y)

    beta, decay = gates_by_loops(p, x4)
    parts = {}
    for name, part in zip("qkv", linear("qkv", x4).split(channels, -1), strict=True):
        part = part * mask
        if f"conv_{name}.weight" in p:
            part = conv_by_loops(part, p[f"conv_{name}.weight"], ends)
        parts[name] = part
    for name, scale in (("q", 1.0), ("k", key_scale)):
        if f"{name}_norm.weight" in p:
            size = ((parts[name] ** 2).mean(-1, keepdim=True) + norm_eps).sqrt()
            parts[name] = parts[name] / size * p[f"{name}_norm.weight"]
        parts[name] = scale * parts[name].clamp(min=0)
    q, k, v = (part.reshape(batch, frames, spatial, heads, width) for part in parts.values())
    turned = [
        y if theta is None else rotate_by_complex(y.flatten(1, 2), grid, theta, first).reshape(y.shape) for y in (q, k)
    ]
    numerator, denominator = read_by_loops(q, k, *turned, v, beta, decay, ends, valid)
    if raw:
        return numerator, denominator
    out = (numerator / (denominator + eps)[..., None]).reshape(x4.shape) * mask
    if added is not None:
        out = out + added
    if "output_gate.weight" in p:
        logits = linear("output_gate", x4)
        out = out * (logits / (1 + torch.exp(-logits)))
    return (linear("proj", out) * mask).reshape(x.shape)


def scale_of(mode: str, width: int, spatial: int) -> float:
    """Return the key scale that ``mode`` names."""
    return {"dim_spatial": 1 / math.sqrt(width * spatial), "dim": 1 / math.sqrt(width), "none": 1.0}[mode]
