"""What the FLA backend calls, by the equations in fp64, with the signatures, layouts and rounding of fla-core 0.6.

Packed tables must be given, int32, and agree with each other, as the kernels read them without a check. Rows that no
sequence covers stay NaN.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

CHUNK = 64


def nan(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype or like.dtype, device=like.device)


def sequences(x: Tensor, cu: Tensor | None, indices: Tensor | None = None, tables: bool = True) -> list[Any]:
    """Return ``(batch row, rows of each chunk)`` of every sequence."""
    if cu is None:
        assert indices is None
        bounds = [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    else:
        assert x.shape[0] == 1
        assert cu.dtype == torch.int32
        bounds = [(0, int(a), int(b)) for a, b in zip(cu[:-1], cu[1:], strict=True)]
    found = [(b, [slice(i, min(i + CHUNK, stop)) for i in range(start, stop, CHUNK)]) for b, start, stop in bounds]
    if cu is not None and tables:
        assert indices is not None
        assert indices.dtype == torch.int32
        assert indices.is_contiguous()
        expected = [[n, i] for n, (_, chunks) in enumerate(found) for i in range(len(chunks))]
        assert indices.tolist() == expected
    return found


def each_chunk(*given: Any, **named: Any) -> list[Any]:
    return [(b, rows) for b, chunks in sequences(*given, **named) for rows in chunks]


def heads(x: Tensor, b: int, rows: slice, count: int) -> Tensor:
    """Return ``[HV, rows, width]`` in fp64, key heads repeated over their group."""
    return x[b, rows].double().repeat_interleave(count // x.shape[2], 1).transpose(0, 1)


def decay(g: Tensor | None, b: int, rows: slice, count: int) -> Tensor:
    """Return ``[HV, rows]``, natural logarithm."""
    n = rows.stop - rows.start
    if g is None:
        return torch.zeros(count, n, dtype=torch.float64)
    assert g.dtype == torch.float32
    return g[b, rows].double().T * torch.log(torch.tensor(2.0, dtype=torch.float64))


def between(late: Tensor, early: Tensor) -> Tensor:
    return torch.exp(late[..., :, None] - early[..., None, :])


def chunk_local_cumsum(
    *, g, chunk_size, reverse=False, scale=None, cu_seqlens=None, output_dtype=torch.float, chunk_indices=None
):  # fmt: skip
    assert chunk_size == CHUNK
    assert g.is_contiguous()
    out = nan(*g.shape, like=g, dtype=output_dtype)
    for b, rows in each_chunk(g, cu_seqlens, chunk_indices):
        part = g[b, rows].double()
        total = part.flip(0).cumsum(0).flip(0) if reverse else part.cumsum(0)
        out[b, rows] = (total * (1.0 if scale is None else scale)).to(output_dtype)
    return out


def chunk_scaled_dot_kkt_fwd(*, k, g, beta, cu_seqlens, chunk_size, output_dtype, chunk_indices):
    count = beta.shape[2]
    out = nan(*k.shape[:2], count, chunk_size, like=k, dtype=output_dtype)
    for b, rows in each_chunk(k, cu_seqlens, chunk_indices):
        key, s = heads(k, b, rows, count), decay(g, b, rows, count)
        lower = (beta[b, rows].double().T[..., None] * (key @ key.mT) * between(s, s)).tril(-1)
        out[b, rows] = 0.0
        out[b, rows, :, : lower.shape[-1]] = lower.transpose(0, 1).to(output_dtype)
    return out


def solve_tril(*, A, cu_seqlens, chunk_indices, output_dtype):
    out = nan(*A.shape, like=A, dtype=output_dtype)
    for b, rows in each_chunk(A, cu_seqlens, chunk_indices):
        n = rows.stop - rows.start
        lower = A[b, rows, :, :n].double().transpose(0, 1)
        out[b, rows] = 0.0
        inverse = torch.linalg.inv(torch.eye(n, dtype=torch.float64) + lower)
        out[b, rows, :, :n] = inverse.transpose(0, 1).to(output_dtype)
    return out


def factor(A, b, rows):
    return A[b, rows, :, : rows.stop - rows.start].double().transpose(0, 1)


def recompute_w_u_fwd(*, k, v, beta, A, g, cu_seqlens, chunk_indices):
    count = v.shape[2]
    w, u = nan(*k.shape[:2], count, k.shape[3], like=k), nan(*v.shape, like=v)
    for b, rows in each_chunk(k, cu_seqlens, chunk_indices):
        a, strength = factor(A, b, rows), beta[b, rows].double().T[..., None]
        s = decay(g, b, rows, count)[..., None]
        u[b, rows] = (a @ (strength * heads(v, b, rows, count))).transpose(0, 1).to(u.dtype)
        w[b, rows] = (a @ (strength * s.exp() * heads(k, b, rows, count))).transpose(0, 1).to(w.dtype)
    return w, u


def run_states(k, w, u, g, initial_state, cu_seqlens, chunk_indices, every, tables=True):
    """Return states before every ``every``-th chunk, new values and final states."""
    count = u.shape[2]
    v_new, states, finals = nan(*u.shape, like=u), [], []
    for n, (b, chunks) in enumerate(sequences(k, cu_seqlens, chunk_indices, tables)):
        state = initial_state[n].double()
        for i, rows in enumerate(chunks):
            if i % every == 0:
                states.append(state)
            s = decay(g, b, rows, count)
            new = heads(u, b, rows, count) - heads(w, b, rows, count) @ state
            v_new[b, rows] = new.transpose(0, 1).to(u.dtype)
            until = (s[:, -1:] - s).exp()[..., None]
            state = s[:, -1].exp()[:, None, None] * state + (until * heads(k, b, rows, count)).mT @ new
        finals.append(state)
    h = torch.stack(states).to(k.dtype).reshape(k.shape[0], -1, count, k.shape[3], u.shape[3])
    return h, v_new, torch.stack(finals).float()


def chunk_gated_delta_rule_fwd_h(
    *, k, w, u, g, initial_state, output_final_state, chunk_size, cu_seqlens, chunk_indices
):  # fmt: skip
    h, v_new, final = run_states(k, w, u, g, initial_state, cu_seqlens, chunk_indices, 1)
    return h, v_new, final if output_final_state else None


def chunk_gated_delta_product_fwd_h(
    *, k, w, u, g, initial_state, output_final_state, chunk_size, cu_seqlens, num_householder, chunk_indices
):  # fmt: skip
    assert u.shape[2] == k.shape[2]
    if cu_seqlens is not None:  # chunks are counted in tokens
        sequences(k[:, ::num_householder], cu_seqlens // num_householder, chunk_indices)
    h, v_new, final = run_states(k, w, u, g, initial_state, cu_seqlens, None, num_householder, tables=False)
    return h, v_new, final if output_final_state else None


def chunk_gated_delta_product_fwd_o(
    *, q, k, v, h, g, scale, cu_seqlens, chunk_size, num_householder, chunk_indices
):  # fmt: skip
    count, steps = v.shape[2], num_householder
    assert count == q.shape[2] == k.shape[2]
    assert k.shape[1] == steps * q.shape[1]
    o = nan(*q.shape[:2], *v.shape[2:], like=v)
    for state, (b, tokens) in zip(h.double().flatten(0, 1), each_chunk(q, cu_seqlens, chunk_indices), strict=True):
        rows = slice(tokens.start * steps, tokens.stop * steps)
        query, s = heads(q, b, tokens, count), decay(g, b, tokens, count)
        of_rows = s.repeat_interleave(steps, 1)
        token = torch.arange(tokens.stop - tokens.start)
        seen = token[:, None] >= token.repeat_interleave(steps)[None, :]
        scores = query @ heads(k, b, rows, count).mT * torch.where(seen, between(s, of_rows), 0.0)
        out = s.exp()[..., None] * (query @ state) + scores @ heads(v, b, rows, count)
        o[b, tokens] = (scale * out).transpose(0, 1).to(o.dtype)
    return o


def chunk_fwd_o(*, q, k, v, h, g, scale, cu_seqlens, chunk_size, chunk_indices):
    count = v.shape[2]
    o = nan(*v.shape, like=v)
    for state, (b, rows) in zip(h.double().flatten(0, 1), each_chunk(q, cu_seqlens, chunk_indices), strict=True):
        query, s = heads(q, b, rows, count), decay(g, b, rows, count)
        scores = (query @ heads(k, b, rows, count).mT * between(s, s)).tril()
        out = s.exp()[..., None] * (query @ state) + scores @ heads(v, b, rows, count)
        o[b, rows] = (scale * out).transpose(0, 1).to(o.dtype)
    return o


def chunk_bwd_dv_local(*, q, k, do, g, scale, cu_seqlens, chunk_size, chunk_indices):
    count = do.shape[2]
    dv = nan(*do.shape, like=do)
    for b, rows in each_chunk(q, cu_seqlens, chunk_indices):
        s = decay(g, b, rows, count)
        scores = (heads(q, b, rows, count) @ heads(k, b, rows, count).mT * between(s, s)).tril()
        dv[b, rows] = (scale * scores.mT @ heads(do, b, rows, count)).transpose(0, 1).to(dv.dtype)
    return dv


def adjoint_step(q, k, w, do, dv, g, scale, b, rows, dstate):
    """Return the gradient of new values and of the state before a chunk."""
    count = do.shape[2]
    s = decay(g, b, rows, count)
    until = (s[:, -1:] - s).exp()[..., None]
    dnew = heads(dv, b, rows, count) + until * heads(k, b, rows, count) @ dstate
    since = s.exp()[..., None] * heads(q, b, rows, count)
    before = s[:, -1].exp()[:, None, None] * dstate + scale * since.mT @ heads(do, b, rows, count)
    return dnew, before - heads(w, b, rows, count).mT @ dnew


def chunk_gated_delta_rule_bwd_dhu(*, q, k, w, do, dv, g, h0, dht, scale, cu_seqlens, chunk_size, chunk_indices):
    dv2, dstates, firsts = nan(*dv.shape, like=dv), [], []
    for n, (b, chunks) in enumerate(sequences(q, cu_seqlens, chunk_indices)):
        dstate, own = dht[n].double(), []
        for rows in reversed(chunks):
            own.append(dstate)
            dnew, dstate = adjoint_step(q, k, w, do, dv, g, scale, b, rows, dstate)
            dv2[b, rows] = dnew.transpose(0, 1).to(dv.dtype)
        dstates += reversed(own)
        firsts.append(dstate)
    dh = torch.stack(dstates).to(q.dtype).reshape(q.shape[0], -1, do.shape[2], q.shape[3], do.shape[3])
    return dh, None if h0 is None else torch.stack(firsts).float(), dv2


def chunk_grads(q, k, v_new, do, h, dh, g, dv, *, scale, chunk_size, cu_seqlens, chunk_indices):
    count, batch, rows_count, width = do.shape[2], *q.shape[:2], q.shape[3]
    dq, dk = (nan(batch, rows_count, count, width, like=q, dtype=torch.float32) for _ in range(2))
    dw = nan(batch, rows_count, count, width, like=k)
    dg = None if g is None else nan(*g.shape, like=g)
    chunks = each_chunk(q, cu_seqlens, chunk_indices)
    for state, dstate, (b, rows) in zip(h.double().flatten(0, 1), dh.double().flatten(0, 1), chunks, strict=True):
        query, key, new, dout, dnew = (heads(x, b, rows, count) for x in (q, k, v_new, do, dv))
        s = decay(g, b, rows, count)
        y = scale * (dout @ new.mT * between(s, s)).tril()
        tq = scale * s.exp()[..., None] * (dout @ state.mT) + y @ key
        end = (s[:, -1:] - s).exp()[..., None] * (new @ dstate.mT)
        tk = end + y.mT @ query
        for out, value in ((dq, tq), (dk, tk), (dw, -dnew @ state.mT)):
            out[b, rows] = value.transpose(0, 1).to(out.dtype)
        if dg is not None:
            part = (tq * query).sum(-1) - (tk * key).sum(-1)
            part[:, -1] += s[:, -1].exp() * (state * dstate).sum((1, 2)) + (end * key).sum((1, 2))
            dg[b, rows] = part.T.to(dg.dtype)
    group = count // q.shape[2]
    dq, dk = (x.view(batch, rows_count, -1, group, width).sum(3) for x in (dq, dk))
    return dq, dk, dw, dg


def prepare_wy_repr_bwd(*, k, v, beta, A, dw, du, g, cu_seqlens, chunk_indices):
    count = v.shape[2]
    dk = nan(*k.shape[:2], count, k.shape[3], like=k)
    dv, dbeta = nan(*v.shape, like=v), nan(*beta.shape, like=beta)
    dg = None if g is None else nan(*g.shape, like=g)
    for b, rows in each_chunk(k, cu_seqlens, chunk_indices):
        key, value, a = heads(k, b, rows, count), heads(v, b, rows, count), factor(A, b, rows)
        strength, s = beta[b, rows].double().T[..., None], decay(g, b, rows, count)
        since, gram = s.exp()[..., None], key @ key.mT
        tw, tu = heads(dw, b, rows, count), heads(du, b, rows, count)
        da = tw @ (strength * since * key).mT + tu @ (strength * value).mT
        zk, zv = a.mT @ tw, a.mT @ tu
        dl = (-a.mT @ da @ a.mT).tril(-1)
        x, lower = dl * between(s, s).tril(), (strength * gram * between(s, s)).tril(-1)
        parts = {
            "dk": strength * since * zk + strength * (x @ key) + x.mT @ (strength * key),
            "dv": strength * zv,
        }
        dk[b, rows], dv[b, rows] = (y.transpose(0, 1).to(k.dtype) for y in parts.values())
        own = (since * zk * key).sum(-1) + (zv * value).sum(-1) + (x * gram).sum(-1)
        dbeta[b, rows] = own.T.to(beta.dtype)
        if dg is not None:
            part = (zk * strength * since * key).sum(-1) + (dl * lower).sum(-1) - (dl * lower).sum(-2)
            dg[b, rows] = part.T.to(dg.dtype)
    if count != k.shape[2]:
        dk = dk.view(*k.shape[:3], -1, k.shape[3]).sum(3)
    return dk, dv, dbeta, dg


def chunk_cp_fwd_h(*, k, w, u, hm, g, cu_seqlens, chunk_size, multi_seqs):
    """One sequence of the table, or all of them; rows of ``hm`` as sequences only then."""
    assert hm.dtype == torch.float32
    assert hm.is_contiguous()
    assert cu_seqlens.dtype == torch.int32
    count, width, value_width = u.shape[2], k.shape[3], u.shape[3]
    for n, (b, chunks) in enumerate(sequences(k, cu_seqlens, tables=False)):
        out = hm[n] if multi_seqs else hm
        state = torch.zeros(count, width, value_width + width, dtype=torch.float64)
        state[..., value_width:] = torch.eye(width, dtype=torch.float64)
        for rows in chunks:
            s = decay(g, b, rows, count)
            zero = torch.zeros(count, s.shape[1], width, dtype=torch.float64)
            new = torch.cat([heads(u, b, rows, count), zero], -1) - heads(w, b, rows, count) @ state
            until = (s[:, -1:] - s).exp()[..., None]
            state = s[:, -1].exp()[:, None, None] * state + (until * heads(k, b, rows, count)).mT @ new
        out.copy_(state.float())
        if not multi_seqs:
            return


def chunk_cp_bwd_dh(*, q, k, w, do, dv, dhm, g, scale, cu_seqlens, chunk_size):
    assert dhm.dtype == torch.float32
    assert dhm.is_contiguous()
    assert q.shape[0] == 1
    count, width, value_width = do.shape[2], k.shape[3], do.shape[3]
    assert dhm.shape == (count, width, value_width + width)
    b, chunks = sequences(q, cu_seqlens, tables=False)[0]
    dstate = torch.zeros(count, width, value_width + width, dtype=torch.float64)
    dstate[..., value_width:] = torch.eye(width, dtype=torch.float64)
    zero = torch.zeros(1, q.shape[1], count, width, dtype=do.dtype)
    wide_do, wide_dv = torch.cat([do, zero], -1), torch.cat([dv, zero], -1)
    for rows in reversed(chunks):
        _, dstate = adjoint_step(q, k, w, wide_do, wide_dv, g, scale, b, rows, dstate)
    dhm.copy_(dstate.float())


def chunk_cp_merge(*, h, ag_hm, num_ranks, rank, forward):
    assert h.is_contiguous()
    assert ag_hm.is_contiguous()
    assert ag_hm.dim() == 4
    width = ag_hm.shape[2]
    state = torch.zeros(ag_hm.shape[1], width, ag_hm.shape[3] - width, dtype=torch.float64)
    for i in range(num_ranks):
        x = ag_hm[rank - num_ranks + i if forward else rank + num_ranks - i].double()
        state = x[..., -width:] @ state + x[..., :-width]
    h.view(state.shape).copy_(state)


def input_guard(function):
    def guarded(*given):
        return function(*(x.contiguous() if isinstance(x, Tensor) else x for x in given))

    return guarded


def strict(function: Any) -> Any:
    """Return the function for contiguous operands only: the kernels compute addresses from shapes."""

    def called(*given: Any, **named: Any) -> Any:
        for x in (*given, *named.values()):
            assert not isinstance(x, Tensor) or x.is_contiguous(), f"{function.__name__}: strides {x.stride()}"
        return function(*given, **named)

    return called


def functions() -> types.SimpleNamespace:
    """Return them as `gdn_cp.delta_product.fla_functions.load` returns FLA's."""
    names = (
        "chunk_local_cumsum", "solve_tril", "chunk_scaled_dot_kkt_fwd", "chunk_gated_delta_rule_fwd_h",
        "chunk_gated_delta_rule_bwd_dhu", "chunk_fwd_o", "chunk_bwd_dv_local", "recompute_w_u_fwd",
        "prepare_wy_repr_bwd", "chunk_gated_delta_product_fwd_h", "chunk_gated_delta_product_fwd_o", "chunk_cp_fwd_h",
        "chunk_cp_bwd_dh", "chunk_cp_merge", "chunk_grads",
    )  # fmt: skip
    found = {name: strict(globals()[name]) for name in names}
    return types.SimpleNamespace(input_guard=input_guard, **found)
