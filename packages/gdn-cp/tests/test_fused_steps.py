"""The two published autograd Functions against the transcription's algebra, with gradcheck and every error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from published import B, Case, D, H, S, turned
from torch import Tensor

from gdn_cp import CPContext, cp_frame_gdn_scan, cp_fused_gdn_chunkwise_raw_autograd
from gdn_cp.fused import _CpFusedGdnOutput, _CpFusedGdnPrep
from gdn_cp.fused_steps import half_tables

F = 2
NAMES = ("qkv", "beta", "decay", "q_norm_weight", "k_norm_weight", "rope_cos", "rope_sin")


def given(weights: str = "qk") -> dict[str, Any]:
    return dict.fromkeys(NAMES) | Case((F,), weights=weights).tensors()


def eager_operators(x: dict[str, Any]) -> list[Tensor]:
    """W_kv, U_kv, W_z, U_z and the normed tensor, token by token in sums of outer products."""
    q, k, v = x["qkv"].unbind(2)
    if x["q_norm_weight"] is not None or x["k_norm_weight"] is not None:
        ones = torch.ones(H * D, dtype=q.dtype)
        q, k = (
            y / (y.pow(2).sum((2, 3), keepdim=True) / (H * D) + 1e-5).sqrt() * (ones if w is None else w).view(H, D)
            for y, w in ((q, x["q_norm_weight"]), (k, x["k_norm_weight"]))
        )
    normed = torch.stack((q, k, v), 2)
    k = 0.6 * k.clamp(min=0)
    kr = turned(k, x["rope_cos"], x["rope_sin"])
    W_kv, U_kv, W_z, U_z = ([] for _ in range(4))
    for bh in range(B * H):
        b, h = divmod(bh, H)
        for f in range(F):
            P = P_z = A = torch.zeros(D, D, dtype=q.dtype)
            b_z = torch.zeros(D, dtype=q.dtype)
            for s in range(S):
                n, beta = f * S + s, x["beta"][b, h, f, s]
                P = P + beta * torch.outer(kr[b, n, h], kr[b, n, h])
                P_z = P_z + beta * torch.outer(k[b, n, h], k[b, n, h])
                A = A + beta * torch.outer(kr[b, n, h], v[b, n, h])
                b_z = b_z + beta * k[b, n, h]
            decay, eye = x["decay"][b, h, f], torch.eye(D, dtype=q.dtype)
            for stack, y in zip(
                (W_kv, U_kv, W_z, U_z), (decay * (eye - P).T, A.T, decay * (eye - P_z), b_z), strict=True
            ):
                stack.append(y)
    return [*(torch.stack(y).unflatten(0, (B * H, F)) for y in (W_kv, U_kv, W_z, U_z)), normed]


def prepare(x: dict[str, Any], *more: Any) -> tuple[Tensor, ...]:
    return _CpFusedGdnPrep.apply(*(x[name] for name in NAMES), F, S, 0.6, *more)


@pytest.mark.parametrize("weights", ["qk", "q", "k", ""])
def test_prep_makes_the_documented_operators_and_gradients(weights):
    """Every input from strided incoming gradients; a weight that is None has none."""
    leaves = {n: x if x is None or n.startswith("rope") else x.requires_grad_() for n, x in given(weights).items()}
    wanted = [x for x in leaves.values() if x is not None and x.requires_grad]
    found, expected = prepare(leaves, 1e-5, 2), eager_operators(leaves)
    for x, y in zip(found, expected, strict=True):
        assert x.is_contiguous()
        assert torch.allclose(x, y, rtol=1e-10, atol=1e-12)
    ups = [torch.randn(x.shape[::-1], dtype=torch.float64).permute(*range(x.ndim)[::-1]) for x in found]
    for x, y in zip(torch.autograd.grad(found, wanted, ups), torch.autograd.grad(expected, wanted, ups), strict=True):
        assert torch.allclose(x, y, rtol=1e-10, atol=1e-12)


def test_prep_defaults_and_dtypes():
    """norm_eps 1e-5 and dot_precision 0 may be left out; transitions in fp32, the normed tensor in qkv's dtype."""
    x = {n: y if y is None else y.bfloat16() if n == "qkv" else y.float() for n, y in given().items()}
    bare, full = prepare(x), prepare(x, 1e-5, 0)
    assert all(torch.equal(y, z) for y, z in zip(bare, full, strict=True))
    assert [y.dtype for y in bare] == [torch.float32] * 4 + [torch.bfloat16]
    leaf = x["qkv"].requires_grad_()
    prepare(x)[4].sum().backward()
    assert leaf.grad.dtype == torch.bfloat16


def test_prep_hands_on_what_it_does_not_normalise():
    x = given("")
    assert torch.equal(prepare(x)[4], x["qkv"])
    assert torch.equal(prepare(given())[4][:, :, 2], given()["qkv"][:, :, 2])


def test_output_reads_the_states():
    """num = qr S', den = q z with q = ReLU of the first channel block; gradients of k and v are exact zeros."""
    x = given()
    leaves = [x["qkv"], torch.randn(B * H, F, D, D).double(), torch.randn(B * H, F, D).double()]
    qkv, S_kv, S_z = (y.requires_grad_() for y in leaves)
    num, den = _CpFusedGdnOutput.apply(qkv, x["rope_cos"], x["rope_sin"], S_kv, S_z, 8, F, S, 2)
    q = qkv[:, :, 0].clamp(min=0)
    qr = turned(q, x["rope_cos"], x["rope_sin"])
    expected_num = torch.stack([
        torch.stack([S_kv[b * H + h, n // S] @ qr[b, n, h] for h in range(H)])
        for b in range(B) for n in range(F * S)
    ]).view(B, F * S, H, D)  # fmt: skip
    expected_den = torch.stack([
        S_z[b * H + h, n // S] @ q[b, n, h] for b in range(B) for h in range(H) for n in range(F * S)
    ]).view(B, H, F * S)  # fmt: skip
    assert torch.allclose(num, expected_num, rtol=1e-12, atol=1e-12)
    assert torch.allclose(den, expected_den, rtol=1e-12, atol=1e-12)
    ups = [torch.randn(*y.shape, 2).double()[..., 0] for y in (num, den)]
    found = torch.autograd.grad((num, den), leaves, ups)
    for y, z in zip(found, torch.autograd.grad((expected_num, expected_den), leaves, ups), strict=True):
        assert torch.allclose(y, z, rtol=1e-12, atol=1e-12)
    assert not found[0][:, :, 1:].any()


def test_output_dtypes():
    x = {n: y if y is None else y.float() for n, y in given().items()}
    states = torch.randn(B * H, F, D, D), torch.randn(B * H, F, D)
    for more, dtype in (((), torch.bfloat16), ((0,), torch.bfloat16), ((1,), torch.float32)):
        found = _CpFusedGdnOutput.apply(x["qkv"], x["rope_cos"], x["rope_sin"], *states, D, F, S, *more)
        assert [y.dtype for y in found] == [dtype] * 2


def test_prep_scan_output_is_the_fused_function():
    x = given()
    W_kv, U_kv, W_z, U_z, normed = prepare(x, 1e-5, 2)
    states = cp_frame_gdn_scan(W_kv, U_kv, W_z, U_z, CPContext.single())
    num, den = _CpFusedGdnOutput.apply(normed, x["rope_cos"], x["rope_sin"], *states, D, F, S, 2)
    raw = cp_fused_gdn_chunkwise_raw_autograd(*(x[name] for name in NAMES), F=F, S=S, group=CPContext.single(),
                                              k_scale=0.6, dot_precision=2)  # fmt: skip
    assert torch.allclose(num, raw.num, rtol=1e-10, atol=1e-12)
    assert torch.allclose(den, raw.den, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    x = given()
    small = {n: y[:1] if n in ("qkv", "beta", "decay") else y for n, y in x.items()}
    tables = small.pop("rope_cos"), small.pop("rope_sin")
    assert torch.autograd.gradcheck(
        lambda *y: _CpFusedGdnPrep.apply(*y, *tables, F, S, 0.6, 1e-5, 2)[:4],
        [y.requires_grad_() for y in small.values()], fast_mode=True,
    )  # fmt: skip
    states = torch.randn(H, F, D, D).double().requires_grad_(), torch.randn(H, F, D).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda qkv, *y: _CpFusedGdnOutput.apply(qkv, *tables, *y, D, F, S, 2), (small["qkv"], *states), fast_mode=True
    )


def test_gradients_are_made_once():
    x = given()
    leaf = x["beta"].requires_grad_()
    (gradient,) = torch.autograd.grad(prepare(x)[0].square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradient.sum().backward()


def test_half_tables_take_the_sine_with_its_own_sign():
    angle = torch.randn(5, 2)
    cos, sin = angle.cos().repeat_interleave(2, 1), torch.stack((-angle.sin(), angle.sin()), 2).flatten(1)
    tables = half_tables(cos, sin)
    assert torch.equal(tables.cos, angle.cos())
    assert torch.equal(tables.sin, angle.sin())


def test_prep_errors():
    x = given()
    for changes, kind, text in (
        ({"qkv": x["qkv"][:, :, :2]}, ValueError, r"qkv must have shape \[B, N, 3, H, D\], got \[2, 10, 2, 3, 4\]"),
        ({"qkv": x["qkv"][:, 1:]}, ValueError, r"qkv must have N = F\*S = 2\*5 = 10 tokens, got 9"),
        ({"qkv": x["qkv"].long()}, ValueError, "qkv must have dtype"),
        ({"beta": x["beta"][..., 0]}, ValueError, "beta must have shape"),
        ({"decay": x["decay"][..., 0]}, ValueError, "decay must have shape"),
        ({"k_norm_weight": x["k_norm_weight"][1:]}, ValueError, r"k_norm_weight must have shape \[H\*D\] = \[12\]"),
        ({"rope_sin": x["rope_sin"][1:]}, ValueError, r"rope_sin must have shape \[N, D\]"),
    ):
        with pytest.raises(kind, match=text):
            prepare(x | changes)
    with pytest.raises(ValueError, match="dot_precision must be 0"):
        prepare(x, 1e-5, 4)
    with pytest.raises(ValueError, match="norm_eps must be a finite number >= 0"):
        prepare(x, -1.0)
    with pytest.raises(ValueError, match="k_scale must be a finite number > 0"):
        _CpFusedGdnPrep.apply(*(x[name] for name in NAMES), F, S, 0.0)


def test_output_errors():
    x = given()
    S_kv, S_z = torch.rand(B * H, F, D, D), torch.rand(B * H, F, D)

    def call(
        qkv: Tensor = x["qkv"], S_kv: Tensor = S_kv, S_z: Tensor = S_z, block_d: int = D, precision: int = 0
    ) -> None:
        _CpFusedGdnOutput.apply(qkv, x["rope_cos"], x["rope_sin"], S_kv, S_z, block_d, F, S, precision)

    with pytest.raises(ValueError, match=r"qkv_normed must have shape \[B, N, 3, H, D\]"):
        call(qkv=x["qkv"][:, :, :2])
    with pytest.raises(ValueError, match=r"qkv_normed must have N = F\*S"):
        call(qkv=x["qkv"][:, 1:])
    with pytest.raises(
        ValueError, match=r"S_kv must have shape \[B\*H, F, D, D\] = \[6, 2, 4, 4\], got \[6, 1, 4, 4\]"
    ):
        call(S_kv=S_kv[:, 1:])
    with pytest.raises(ValueError, match=r"S_z must have shape \[B\*H, F, D\] = \[6, 2, 4\], got \[6, 2, 3\]"):
        call(S_z=S_z[..., 1:])
    with pytest.raises(ValueError, match="block_d must be >= D = 4, got 3"):
        call(block_d=3)
    with pytest.raises(ValueError, match="dot_precision must be 0"):
        call(precision=-1)
