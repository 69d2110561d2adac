"""Gated delta product chunk by chunk, forward and backward by hand: batched products, and one loop over chunks.

Letters: N fragments, X chunks of all fragments (ordered as in `gdn_kernels.reference.delta_product_grid`), C tokens of
a chunk, R steps of a token, n = C*R rows, row t*R + j being step j of token t, H heads of q and k, G value heads per
head, HV = H*G, K and V widths. Inside, heads come before rows:

    q [X, H, C, K]      k [X, H, n, K]      w [X, H, G, n, K]      v, u, v_new [X, H, G, n, V]      beta [X, H, G, n]
    g [X, H, G, C]      output, doutput [X, H, G, C, V]            states before a chunk [X, H, G, K, V]
    states of fragments [N, HV, K, V]                              summaries of fragments [N, HV, K, V + K]

q and k are not copied per value head: products with them fold G into rows or columns, or sum over it first. Tensors of
a call have one dtype, fp32 or fp64. Nothing writes into an argument. The equations are those of
``delta_product/README.md``; a padding row has q, k, v, beta and g of 0 and so takes no part in any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, einsum
from torch.nn.functional import pad

from gdn_kernels.reference.delta_product_grid import ScanPlan


class ChunkDecay(NamedTuple):
    """Decays inside chunks, for tokens s and t; Gamma_t is the sum of g over the chunk's tokens up to t, t included.

    ``between [X, H, G, C, C]`` is exp(Gamma_t - Gamma_s) for s <= t and 0 above, ``entry [X, H, G, C]`` exp(Gamma_t),
    ``exit [X, H, G, C]`` exp(Gamma_last - Gamma_t), ``whole [X, H, G]`` exp(Gamma_last). Ungated, ``between [C, C]`` is
    the lower triangle of ones and the others are None.
    """

    between: Tensor
    entry: Tensor | None
    exit: Tensor | None
    whole: Tensor | None


class WYFactors(NamedTuple):
    """A chunk that meets the state S writes ``v_new = u - w S``; ``w [X, H, G, n, K]``, ``u [X, H, G, n, V]``."""

    w: Tensor
    u: Tensor


class ChunkStates(NamedTuple):
    """``states [X, H, G, K, V]`` before every chunk, ``v_new [X, H, G, n, V]``, ``final_state [N, HV, K, V]``."""

    states: Tensor
    v_new: Tensor
    final_state: Tensor


class ChunkGradients(NamedTuple):
    """Gradients in the layouts of their inputs; ``dg`` is None without a gate."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbeta: Tensor
    dg: Tensor | None
    dinitial_state: Tensor


def chunk_decay(g: Tensor | None, chunk_tokens: int, like: Tensor) -> ChunkDecay:
    """Return the decays for ``g [X, H, G, C]``, or for None in dtype and device of ``like``.

    Sums run over the tokens between s and t only: a strong decay elsewhere in the chunk costs no accuracy.
    """
    if g is None:
        lower = torch.ones(chunk_tokens, chunk_tokens, dtype=like.dtype, device=like.device).tril()
        return ChunkDecay(lower, None, None, None)
    later = g[..., :, None].expand(*g.shape, chunk_tokens).tril(-1)  # g of row t, where it lies after column s
    between = later.cumsum(-2).exp().tril()
    entry = g.cumsum(-1).exp()
    return ChunkDecay(between, entry, between[..., -1, :], entry[..., -1])


def wy_factors(k: Tensor, v: Tensor, beta: Tensor, decay: ChunkDecay) -> WYFactors:
    """Resolve how the rows of a chunk correct one another, whatever the state before it.

        (I + L) [W | U] = diag(beta) [e^Gamma K | V]        L_ij = beta_i <k_i, k_j> e^(Gamma_i - Gamma_j) for j < i

    Cost: 2 n^2 K flops per head and n^2 (K + V) per value head and chunk.
    """
    right = torch.cat((_times(k[:, :, None] * beta[..., None], decay.entry), v * beta[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(
        _corrections(k, beta, decay), right, upper=False, unitriangular=True
    )  # the diagonal is not read
    return WYFactors(*solved.split([k.shape[-1], v.shape[-1]], dim=-1))


def chunk_forward(
    q: Tensor,
    k: Tensor,
    decay: ChunkDecay,
    factors: WYFactors,
    plan: ScanPlan,
    initial_state: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, ChunkStates]:
    """Run the fragments from ``initial_state [N, HV, K, V]`` (None is zero); return output and states.

    Cost: per value head and chunk 6 n K V + 2 C n V flops, and 2 C n K per head; as many dependent steps as the
        longest fragment has chunks.
    """
    states = chunk_states(k, decay, factors, plan, initial_state)
    return chunk_output(q, k, decay, states, scale=scale), states


def chunk_states(
    k: Tensor, decay: ChunkDecay, factors: WYFactors, plan: ScanPlan, initial_state: Tensor | None = None
) -> ChunkStates:
    """Scan the chunks: the part of `chunk_forward` that is sequential, and that a backward may run again."""
    w, u = factors
    if initial_state is None:
        initial_state = u.new_zeros(len(plan.counts), u.shape[1] * u.shape[2], w.shape[-1], u.shape[-1])
    return _scan(k, w, u, decay, plan, initial_state)


def chunk_output(q: Tensor, k: Tensor, decay: ChunkDecay, states: ChunkStates, *, scale: float) -> Tensor:
    """Read out all chunks at once: ``scale (e^Gamma q S + token_lower(q k' e^(Gamma_t - Gamma_i)) v_new)``."""
    from_state = _times(einsum("xhck,xhgkv->xhgcv", q, states.states), decay.entry)
    return (from_state + _read_weights(q, k, decay) @ states.v_new) * scale


def forward_summary(
    k: Tensor, decay: ChunkDecay, factors: WYFactors, plan: ScanPlan, fragments: Sequence[int] | None = None
) -> Tensor:
    """Return ``[b | M]`` of fragments, ``[N', HV, K, V + K]`` contiguous: ``final = M initial + b``.

    One scan of V + K columns from ``[0 | I]``. An empty fragment is ``[0 | I]``.

    Args:
        k: as in `chunk_forward`.
        decay: as in `chunk_forward`.
        factors: as in `chunk_forward`.
        plan: as in `chunk_forward`.
        fragments: which ones, in this order; None is all.
    """
    plan, (k, w, u), decay = _select(plan, fragments, (k, *factors), decay)
    start = _identity_state(plan, u, k.shape[-1])
    return _scan(k, w, pad(u, (0, k.shape[-1])), decay, plan, start).final_state


def backward_summary(
    q: Tensor,
    k: Tensor,
    decay: ChunkDecay,
    w: Tensor,
    doutput: Tensor,
    plan: ScanPlan,
    fragments: Sequence[int] | None = None,
    *,
    scale: float,
) -> Tensor:
    """Return ``[gamma | M^T]`` of fragments, ``[N', HV, K, V + K]`` contiguous: ``dinitial = M^T dfinal + gamma``.

    M is that of `forward_summary`. Neither states nor values are needed. An empty fragment is ``[0 | I]``.

    Args:
        q: as in `chunk_forward`.
        k: as in `chunk_forward`.
        decay: as in `chunk_forward`.
        w: of `wy_factors`.
        doutput: ``[X, H, G, C, V]``.
        plan: as in `chunk_forward`.
        fragments: which ones, in this order; None is all.
        scale: as in `chunk_forward`.
    """
    plan, (q, k, w, doutput), decay = _select(plan, fragments, (q, k, w, doutput), decay)
    doutput = doutput * scale
    dv = _read_weights(q, k, decay).mT @ doutput
    start, wider = _identity_state(plan, doutput, k.shape[-1]), (0, k.shape[-1])
    return _scan_back(q, k, w, decay, pad(doutput, wider), pad(dv, wider), plan, start)[2]


def chunk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: ChunkDecay,
    factors: WYFactors,
    states: ChunkStates,
    doutput: Tensor,
    dfinal_state: Tensor | None,
    plan: ScanPlan,
    *,
    scale: float,
) -> ChunkGradients:
    """Return the gradient of every input of `wy_factors` and `chunk_forward`, chunks right to left.

    Args:
        q: as in `chunk_forward`.
        k: as in `chunk_forward`.
        v: as in `wy_factors`.
        beta: as in `wy_factors`.
        decay: as in `chunk_forward`.
        factors: of `wy_factors`.
        states: of `chunk_states`.
        doutput: ``[X, H, G, C, V]``.
        dfinal_state: ``[N, HV, K, V]``; None is zero.
        plan: as in `chunk_forward`.
        scale: as in `chunk_forward`.
    """
    w, u = factors
    if dfinal_state is None:
        dfinal_state = torch.zeros_like(states.final_state)
    doutput = doutput * scale
    dv_local = _read_weights(q, k, decay).mT @ doutput
    dv_new, dstates, dinitial = _scan_back(q, k, w, decay, doutput, dv_local, plan, dfinal_state)

    # read-out and write, given dv_new and the gradient of the state after every chunk
    rows = k.shape[2] // q.shape[2]
    dweights = doutput @ states.v_new.mT  # [X, H, G, C, n], gradient of the weights of the read-out
    dqk = _over_token_pairs(dweights, decay.between, 1, rows)
    dq_state = _times(einsum("xhgcv,xhgkv->xhgck", doutput, states.states), decay.entry)
    dk_state = _times(einsum("xhgnv,xhgkv->xhgnk", states.v_new, dstates), decay.exit)
    dq = dq_state.sum(2) + dqk.sum(2) @ k
    dk = dk_state.sum(2) + dqk.sum(2).mT @ q

    # the triangular system: z = (I + L)^-T [dw | du], and dL on its strict lower triangle
    solved = torch.linalg.solve_triangular(
        _corrections(k, beta, decay).mT,
        torch.cat((-(dv_new @ states.states.mT), dv_new), dim=-1),
        upper=True,
        unitriangular=True,
    )
    zk, zv = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    dcorrections = -(zk @ w.mT + zv @ u.mT).tril(-1)
    dkk = _over_token_pairs(dcorrections, decay.between, rows, rows)  # beta not in it yet
    kk = k @ k.mT
    zk_entry = _times(zk, decay.entry)
    along_k = einsum("xhgnk,xhnk->xhgn", zk_entry, k)
    dbeta = along_k + (zv * v).sum(-1) + einsum("xhgij,xhij->xhgi", dkk, kk)
    weighted = einsum("xhgi,xhgij->xhij", beta, dkk)
    dk = dk + (beta[..., None] * zk_entry).sum(2) + (weighted + weighted.mT) @ k
    dv = beta[..., None] * zv
    if decay.whole is None:
        return ChunkGradients(dq, dk, dv, dbeta, None, dinitial)

    # Gamma_t appears wherever token t's decay does: with + as the later token of a pair, with - as the earlier
    read = dqk * (q @ k.mT)[:, :, None]
    correct = beta[..., None] * dkk * kk[:, :, None]
    write = einsum("xhgnk,xhnk->xhgn", dk_state, k)
    by_row = beta * along_k + correct.sum(-1) - correct.sum(-2) - write - read.sum(-2)
    dgamma = einsum("xhgck,xhck->xhgc", dq_state, q) + read.sum(-1) + torch.unflatten(by_row, -1, (-1, rows)).sum(-1)
    at_exit = decay.whole * (states.states * dstates).sum((-2, -1)) + write.sum(-1)
    dgamma = dgamma + pad(at_exit[..., None], (dgamma.shape[-1] - 1, 0))
    dg = dgamma.flip(-1).cumsum(-1).flip(-1)
    return ChunkGradients(dq, dk, dv, dbeta, dg, dinitial)


def _scan(k: Tensor, w: Tensor, u: Tensor, decay: ChunkDecay, plan: ScanPlan, initial_state: Tensor) -> ChunkStates:
    """Step through the chunks with a state of any number of columns, as many as u has."""
    state = torch.unflatten(initial_state.index_select(0, plan.order), 1, u.shape[1:3])
    states, written = [], []
    for part in plan.steps:
        before = state[: part.stop - part.start]
        v_new = u[part] - w[part] @ before
        kept = einsum("xhnk,xhgnv->xhgkv", k[part], _times(v_new, _part(decay.exit, part)))
        states.append(before)
        written.append(v_new)
        state = torch.cat((_times(before, _part(decay.whole, part)) + kept, state[len(before) :]))
    shape = (0, *state.shape[1:])
    return ChunkStates(
        torch.cat(states) if states else state.new_zeros(shape),
        torch.cat(written) if written else torch.zeros_like(u),
        state.flatten(1, 2).index_select(0, plan.position),
    )


def _scan_back(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    decay: ChunkDecay,
    doutput: Tensor,
    dv_local: Tensor,
    plan: ScanPlan,
    dfinal_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dv_new, the gradient of the state after every chunk, and that of the initial state.

    ``doutput`` has been scaled; ``dv_local`` is the part of dv_new that comes from the read-out.
    """
    dstate = torch.unflatten(dfinal_state.index_select(0, plan.order), 1, doutput.shape[1:3])
    dvs, dstates = [], []
    for part in reversed(plan.steps):
        after = dstate[: part.stop - part.start]
        dv = dv_local[part] + _times(einsum("xhnk,xhgkv->xhgnv", k[part], after), _part(decay.exit, part))
        read = _times(doutput[part], _part(decay.entry, part))
        before = _times(after, _part(decay.whole, part)) + einsum("xhck,xhgcv->xhgkv", q[part], read) - w[part].mT @ dv
        dvs.append(dv)
        dstates.append(after)
        dstate = torch.cat((before, dstate[len(after) :]))
    shape = (0, *dstate.shape[1:])
    return (
        torch.cat(dvs[::-1]) if dvs else torch.zeros_like(dv_local),
        torch.cat(dstates[::-1]) if dstates else dstate.new_zeros(shape),
        dstate.flatten(1, 2).index_select(0, plan.position),
    )


def _read_weights(q: Tensor, k: Tensor, decay: ChunkDecay) -> Tensor:
    """Return ``<q_t, k_i> e^(Gamma_t - Gamma_i)`` for rows i of tokens up to t, ``[X, H, G or 1, C, n]``."""
    return _over_token_pairs((q @ k.mT)[:, :, None], decay.between, 1, k.shape[2] // q.shape[2])


def _corrections(k: Tensor, beta: Tensor, decay: ChunkDecay) -> Tensor:
    """Return L, ``[X, H, G, n, n]``, strictly lower."""
    rows = k.shape[2] // decay.between.shape[-1]
    return (_over_token_pairs((k @ k.mT)[:, :, None], decay.between, rows, rows) * beta[..., None]).tril(-1)


def _over_token_pairs(x: Tensor, between: Tensor, rows: int, columns: int) -> Tensor:
    """Multiply ``x [..., C*rows, C*columns]`` by the ``between [..., C, C]`` of the tokens its entries belong to."""
    by_token = torch.unflatten(torch.unflatten(x, -1, (-1, columns)), -3, (-1, rows))  # [..., C, rows, C, columns]
    return (by_token * between[..., :, None, :, None]).flatten(-4, -3).flatten(-2)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    """Multiply ``x [X, H, G, ...]`` by a factor per chunk or token, ``[X, H, G]`` or ``[X, H, G, C]``; None is 1."""
    if factor is None:
        return x
    if factor.ndim == 4:
        return x * factor.repeat_interleave(x.shape[-2] // factor.shape[-1], dim=-1)[..., None]
    return x * factor[..., None, None]


def _part(factor: Tensor | None, part: slice) -> Tensor | None:
    return None if factor is None else factor[part]


def _select(
    plan: ScanPlan, fragments: Sequence[int] | None, tensors: Sequence[Tensor], decay: ChunkDecay
) -> tuple[ScanPlan, Sequence[Tensor], ChunkDecay]:
    """Return plan, tensors and decay of some fragments alone."""
    if fragments is None:
        return plan, tensors, decay
    plan, chunks = plan.select(fragments)
    if decay.whole is not None:
        decay = ChunkDecay._make(x.index_select(0, chunks) for x in decay if x is not None)
    return plan, [x.index_select(0, chunks) for x in tensors], decay


def _identity_state(plan: ScanPlan, like: Tensor, width: int) -> Tensor:
    """Return ``[0 | I]`` for every fragment, ``[N, HV, K, V + K]``."""
    identity = torch.eye(width, dtype=like.dtype, device=like.device)
    return pad(identity, (like.shape[-1], 0)).expand(len(plan.counts), like.shape[1] * like.shape[2], -1, -1)
