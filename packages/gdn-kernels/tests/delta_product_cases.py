"""Inputs of the gated delta product for tests, and an oracle of it that shares no formula with the package.

The oracle multiplies states by dense ``I - beta k' k``, head by head, with q and k copied to every value head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """Tensors of one call as gated_delta_product takes them; ``bounds`` are the token offsets of packed sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None
    initial_state: Tensor | None
    steps: int
    bounds: tuple[int, ...] | None

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that take a gradient, by name."""
        named = {"q": self.q, "k": self.k, "v": self.v, "beta": self.beta, "g": self.g, "state": self.initial_state}
        return {name: value for name, value in named.items() if value is not None}


def make_case(
    steps: int = 2,
    *,
    gated: bool = True,
    group: int = 1,
    tokens: int = 7,
    bounds: Sequence[int] | None = None,
    state: bool = True,
    batch: int = 2,
    heads: int = 2,
    width: int = 5,
    value_width: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Draw unit keys, write strengths in (0, 2) and decays in (0, 1); packed if ``bounds`` are given."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if bounds is not None:
        batch, tokens = 1, bounds[-1]
    count = batch if bounds is None else len(bounds) - 1
    value_heads, rows = heads * group, tokens * steps
    q = draw(batch, tokens, heads, width)
    k = torch.nn.functional.normalize(draw(batch, rows, heads, width), dim=-1)
    v = draw(batch, rows, value_heads, value_width)
    beta = 2 * torch.sigmoid(draw(batch, rows, value_heads))
    g = -0.3 * draw(batch, tokens, value_heads).abs() if gated else None
    entry = draw(count, value_heads, width, value_width) if state else None
    q, k, v, beta = (x.to(dtype).requires_grad_() for x in (q, k, v, beta))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    g, entry = (None if x is None else x.to(wide).requires_grad_() for x in (g, entry))
    return Case(q, k, v, beta, g, entry, steps, None if bounds is None else tuple(bounds))


def dense_delta_product(case: Case, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return output ``[B, T, HV, V]`` and final states ``[N, HV, K, V]`` in the dtype of the case."""
    batch, tokens, heads, width = case.q.shape
    value_heads, value_width = case.v.shape[2:]
    scale = width**-0.5 if scale is None else scale
    identity = torch.eye(width, dtype=case.q.dtype)
    bounds = [0, tokens] if case.bounds is None else list(case.bounds)
    count = batch if case.bounds is None else len(bounds) - 1
    output = [[[torch.zeros(0)] * value_heads for _ in range(tokens)] for _ in range(batch)]
    finals = [[torch.zeros(0)] * value_heads for _ in range(count)]
    for n in range(count):
        row, start, stop = (n, 0, tokens) if case.bounds is None else (0, bounds[n], bounds[n + 1])
        for head in range(value_heads):
            shared = head // (value_heads // heads)
            state = identity.new_zeros(width, value_width)
            if case.initial_state is not None:
                state = case.initial_state[n, head]
            for t in range(start, stop):
                gain = 1.0 if case.g is None else torch.exp(case.g[row, t, head])
                transition, written = identity * gain, torch.zeros_like(state)
                for i in range(t * case.steps, (t + 1) * case.steps):
                    key, strength = case.k[row, i, shared], case.beta[row, i, head]
                    reflection = identity - strength * torch.outer(key, key)
                    transition = reflection @ transition
                    written = reflection @ written + strength * torch.outer(key, case.v[row, i, head])
                state = transition @ state + written
                output[row][t][head] = scale * (state.mT @ case.q[row, t, shared])
            finals[n][head] = state
    stacked = [torch.stack([torch.stack(heads_) for heads_ in rows]) for rows in output if rows]
    result = torch.stack(stacked) if stacked else case.q.new_zeros(batch, 0, value_heads, value_width)
    return result, torch.stack([torch.stack(states) for states in finals])


def upstream(results: Mapping[str, Tensor], seed: int = 1) -> list[Tensor]:
    """Draw a gradient for each result, the same for results of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results.values()]


def gradients(results: Mapping[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Return the gradient of every leaf of the case for the `upstream` of the results."""
    given = zip(results.values(), upstream(results), strict=True)
    live = [(x, dx) for x, dx in given if x.requires_grad]  # an output without tokens does not
    leaves = case.leaves()
    found = torch.autograd.grad(
        [x for x, _ in live], list(leaves.values()), [dx for _, dx in live], materialize_grads=True, allow_unused=True
    )
    return dict(zip(leaves, found, strict=True))
