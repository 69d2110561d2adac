"""The kernel of the gated delta product on a CUDA device, in every block that a width can get, against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from requirements import require_gpu
from torch import Tensor

require_gpu()
from gdn_kernels.delta_product import chunk_grads as module  # noqa: E402
from gdn_kernels.delta_product.chunk_grads import ChunkShape, chunk_grads  # noqa: E402

pytestmark = pytest.mark.gpu
LN2 = math.log(2.0)
CHUNK, ROWS, HEADS, SCALE = 64, 150, 2, 0.3  # the last chunk is ragged
# operands and the products' results between two products are rounded to bf16, 2 ** -9 each; four such steps in a row
BF16 = 4 * 2.0**-9
BLOCKS = [ChunkShape(64, 64, 4), ChunkShape(32, 32, 4), ChunkShape(16, 16, 4)]


def exact(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, g: Tensor | None, dv: Tensor
) -> list[Tensor]:
    """Return dq, dk, dw and dg by the equations, chunk by chunk, all heads at once, in fp64."""
    found = [torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k)]
    dg = torch.zeros(q.shape[:3], dtype=q.dtype, device=q.device)
    for i, first in enumerate(range(0, ROWS, CHUNK)):
        rows = slice(first, min(first + CHUNK, ROWS))
        n = len(range(*rows.indices(ROWS)))
        tq, tk, tv, tdo, tdv = (x[0, rows].transpose(0, 1) for x in (q, k, v, do, dv))  # [H, n, width]
        tg = torch.zeros(HEADS, n, dtype=q.dtype, device=q.device) if g is None else g[0, rows].T
        e = torch.exp2((tg[:, :, None] - tg[:, None, :]).tril()).tril()
        y = SCALE * (tdo @ tv.mT) * e
        dq = SCALE * torch.exp2(tg)[..., None] * (tdo @ h[i].mT) + y @ tk
        dk_s = torch.exp2(tg[:, -1:] - tg)[..., None] * (tv @ dh[i].mT)
        dk = dk_s + y.mT @ tq
        part = (dq * tq).sum(-1) - (dk * tk).sum(-1)
        part[:, -1] += torch.exp2(tg[:, -1]) * (h[i] * dh[i]).sum((1, 2)) + (dk_s * tk).sum((1, 2))
        for x, value in zip(found, (dq, dk, -(tdv @ h[i].mT)), strict=True):
            x[0, rows] = value.transpose(0, 1)
        dg[0, rows] = part.T
    return [*found, dg]


@pytest.mark.parametrize("blocks", BLOCKS, ids=lambda shape: f"block {shape.block_k}")
@pytest.mark.parametrize("widths", [(32, 32), (64, 64), (80, 128), (128, 64), (256, 80)], ids=str)
def test_every_block_is_right(widths: tuple[int, int], blocks: ChunkShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them 64 rows by 64 keys, where a transposed accumulator is miscompiled; bitwise repeatable."""
    monkeypatch.setattr(module, "chunk_shape", lambda *given: blocks)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)

    width, value_width = widths
    q, k = normal(1, ROWS, HEADS, width) / width**0.5, normal(1, ROWS, HEADS, width) / width**0.5
    v, do, dv = (normal(1, ROWS, HEADS, value_width) for _ in range(3))
    h, dh = (normal(3, HEADS, width, value_width) for _ in range(2))
    steps = -torch.rand(1, ROWS, HEADS, generator=generator)
    g = torch.cat([x.cumsum(1) for x in steps.split(CHUNK, 1)], 1).cuda()
    expected = exact(*(x.double() for x in (q, k, v, do, h, dh, g, dv)))
    found, again = (chunk_grads(q, k, v, do, h, dh, g, dv, scale=SCALE) for _ in range(2))
    for name, x, y, value in zip(("dq", "dk", "dw", "dg"), found, again, expected, strict=True):
        assert torch.equal(x, y), name
        error = float((x.double() - value).norm() / value.norm())
        assert error < BF16, f"{name}: {error:.1e}"
