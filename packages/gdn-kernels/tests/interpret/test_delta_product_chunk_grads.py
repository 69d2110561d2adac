"""The chunk gradients of the gated delta product, in the interpreter, against autograd in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import assert_close
from requirements import require_interpreter
from torch import Tensor

require_interpreter()
from gdn_kernels.delta_product.chunk_grads import ChunkGrads, chunk_grads  # noqa: E402

pytestmark = pytest.mark.interpret
LN2 = math.log(2.0)
# sums over at most 24 channels and 16 rows in fp32, in another order
TOLERANCE = 64 * torch.finfo(torch.float32).eps
CHUNK = 16


class Rows:
    """Operands of some rows, and what surrounds their chunks; fragments are runs of rows that share nothing."""

    def __init__(
        self, bounds: list[int], batch: int, heads: int, group: int, widths: tuple[int, int], gated: bool
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).float().double()

        self.bounds, self.heads, self.group, self.scale = bounds, heads, group, 0.4
        rows, values = bounds[-1], heads * group
        self.q, self.k = normal(batch, rows, heads, widths[0]), normal(batch, rows, heads, widths[0])
        self.v, self.do, self.dv = (normal(batch, rows, values, widths[1]) for _ in range(3))
        self.spans = [
            (b, first, min(first + CHUNK, stop))
            for b in range(batch)
            for start, stop in zip(bounds, bounds[1:], strict=False)
            for first in range(start, stop, CHUNK)
        ]
        self.h, self.dh = (normal(len(self.spans), values, *widths) for _ in range(2))
        self.g = None
        if gated:
            steps = -0.3 * normal(batch, rows, values).abs()
            self.g = torch.zeros_like(steps)
            for b, first, stop in self.spans:
                self.g[b, first:stop] = steps[b, first:stop].cumsum(0)  # base 2, from the start of the chunk

    def expected(self) -> ChunkGrads:
        """Differentiate sum(o dO) + <S_next, dS> of every chunk, with V' held fixed; dW by its equation."""
        leaves = [self.q.clone(), self.k.clone(), *([self.g.clone()] if self.g is not None else [])]
        q, k, *gates = (x.requires_grad_() for x in leaves)
        total, dw = (
            torch.zeros((), dtype=torch.float64),
            torch.zeros(*self.v.shape[:3], self.k.shape[3], dtype=torch.float64),
        )
        for i, (b, first, stop) in enumerate(self.spans):
            for head in range(self.heads * self.group):
                rows, key = slice(first, stop), head // self.group
                state, dstate = self.h[i, head], self.dh[i, head]
                value, g = self.v[b, rows, head], gates[0][b, rows, head] if gates else torch.zeros(stop - first)
                seen = torch.tril((q[b, rows, key] @ k[b, rows, key].T) * torch.exp2((g[:, None] - g[None, :]).tril()))
                o = self.scale * (torch.exp2(g)[:, None] * (q[b, rows, key] @ state) + seen @ value)
                after = torch.exp2(g[-1]) * state + (torch.exp2(g[-1] - g)[:, None] * k[b, rows, key]).T @ value
                total = total + (o * self.do[b, rows, head]).sum() + (after * dstate).sum()
                dw[b, rows, head] = -self.dv[b, rows, head] @ state.T
        grads = torch.autograd.grad(total, [q, k, *gates])
        return ChunkGrads(grads[0], grads[1], dw, grads[2] / LN2 if gates else None)

    def found(self, packed: bool) -> ChunkGrads:
        """Run the kernel in fp32."""
        cu = indices = None
        if packed:
            cu = torch.tensor(self.bounds, dtype=torch.int32)
            fragments = [
                max(i for i, start in enumerate(self.bounds[:-1]) if start <= first) for _, first, _ in self.spans
            ]
            pairs = [
                (f, (first - self.bounds[f]) // CHUNK) for f, (_, first, _) in zip(fragments, self.spans, strict=True)
            ]
            indices = torch.tensor(pairs, dtype=torch.int32)
        q, k, v, do, dv, h, dh = (x.float() for x in (self.q, self.k, self.v, self.do, self.dv, self.h, self.dh))
        return chunk_grads(
            q, k, v, do, h, dh, None if self.g is None else self.g.float(), dv, scale=self.scale, chunk_size=CHUNK,
            cu_seqlens=cu, chunk_indices=indices,
        )  # fmt: skip


def check(rows: Rows, packed: bool) -> None:
    found, expected = rows.found(packed), rows.expected()
    for name, value in expected._asdict().items():
        if value is None:
            assert getattr(found, name) is None
        else:
            assert_close(getattr(found, name), value, TOLERANCE, name)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("widths", [(16, 16), (24, 20), (16, 40), (72, 16)], ids=str)
def test_chunk_gradients_agree_with_autograd(widths: tuple[int, int], gated: bool) -> None:
    """Full and ragged last chunks, widths that fill no block and that take several."""
    check(Rows([0, 21], 2, 1, 1, widths, gated), packed=False)


@pytest.mark.parametrize("group", [1, 2])
def test_value_heads_share_a_key_head(group: int) -> None:
    check(Rows([0, 16], 1, 2, group, (16, 16), True), packed=False)


def test_packed_fragments_stay_apart() -> None:
    check(Rows([0, 3, 20, 21], 1, 1, 2, (16, 16), True), packed=True)


def test_strong_decay_stays_finite_and_right() -> None:
    """What is left of dg is a difference of terms that nearly cancel: it is held to the size of those."""
    rows = Rows([0, 16], 1, 1, 1, (16, 16), True)
    assert rows.g is not None
    rows.g *= 400
    found, expected = rows.found(packed=False), rows.expected()
    for name in ("dq", "dk", "dw"):
        assert_close(getattr(found, name), getattr(expected, name), TOLERANCE, name)
    assert found.dg is not None
    assert expected.dg is not None
    terms = (expected.dq * rows.q).sum(-1).abs().max()
    assert (found.dg - expected.dg).abs().max() <= TOLERANCE * terms


def test_no_rows_are_no_gradients() -> None:
    empty = torch.zeros(1, 0, 2, 16)
    found = chunk_grads(
        empty, empty, empty, empty, torch.zeros(0, 2, 16, 16), torch.zeros(0, 2, 16, 16), None, empty, scale=1.0
    )
    assert found.dq.shape == found.dk.shape == found.dw.shape == (1, 0, 2, 16)
