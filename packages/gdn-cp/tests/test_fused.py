"""The published fused functions against an eager transcription: one rank and gloo ranks, every gradient, errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from published import B, Case, D, H, S, call
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gdn_cp.fused
from gdn_cp import (
    CPContext,
    count_exchanges,
    cp_fused_cam_gdn_num_autograd,
    cp_fused_gdn_chunkwise_raw_autograd,
)

ONE = CPContext.single()


def on_rank(case: Case, rank: int, group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Results and gradients of one rank."""
    leaves = {n: case.cut(n, x, rank).clone() for n, x in case.tensors().items()}
    wanted = {n: x.requires_grad_() for n, x in leaves.items() if not n.startswith("rope")}
    results = call(case, leaves, case.counts[rank], group)
    grads = torch.autograd.grad(case.rank_loss(rank, results), list(wanted.values()), allow_unused=True)
    return {n: x.detach() for n, x in results.items()}, dict(zip(wanted, grads, strict=True))


ONE_RANK = [
    *(Case((4,), weights=weights, truncate=k) for weights, k in itertools.product(("qk", "q", "k", ""), (None, 3))),
    *(Case((4,), query_tables=True, weights=weights, truncate=k) for weights, k in (("qk", None), ("", 1), ("k", 4))),
    *(Case((4,), camera=True, beta_dims=dims, truncate=k) for dims, k in itertools.product((3, 4), (None, 2))),
    *(Case((3,), unused=unused, truncate=2) for unused in (("num",), ("den",), ("num", "den"),
                                                            ("terminal_state_kv", "terminal_state_z"))),
    Case((3,), unused=("den",), truncate=2, query_tables=True),
    Case((3,), unused=("out",), truncate=2, camera=True),
    Case((3,), reverse=True), Case((3,), reverse=True, camera=True), Case((3,), use_checkpoint=False),
]  # fmt: skip


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_one_rank_equals_the_transcription(case):
    """FC-A01, FC-A07: norm weights in all combinations, query tables, shapes of beta, truncation, unused results."""
    with count_exchanges() as seen:
        case.compare([on_rank(case, 0, ONE)])
    assert seen.total == 0


RANKS = {
    2: [Case((2, 3)), Case((3, 0), camera=True, reverse=True), Case((2, 2), truncate=1), Case((2, 2), truncate=4,
        camera=True), Case((1, 2), query_tables=True, reverse=True)],
    3: [Case((2, 1, 2), reverse=True, use_checkpoint=False), Case((0, 2, 1), weights=""), Case((2, 2, 2), truncate=3),
        Case((2, 2, 2), truncate=4, query_tables=True, weights="q"), Case((1, 2, 1), camera=True, beta_dims=3),
        Case((2, 0, 1), query_tables=True), Case((2, 2, 2), truncate=5, camera=True, use_checkpoint=True)],
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_equal_the_transcription_with_one_exchange_per_pass(size):
    """Uneven and empty ranks, both rank orders, truncation before, on and after a cut; bytes as promised."""

    def worker(rank: int):
        found = []
        for case in RANKS[size]:
            with count_exchanges() as seen:
                found.append(on_rank(case, rank, dist.group.WORLD))
            assert [label.split()[-1] for label in seen.labels] == ["forward", "backward"]
            state = D * D if case.camera else D * D + D
            square = D * D if case.camera else 2 * D * D
            for sent, promised in zip(
                seen.sent, (square + state, state * (1 + (case.truncate is not None))), strict=True
            ):
                assert 0 <= sent - 8 * B * H * promised < 16 * 6  # blocks start on 16 bytes
        return found

    for case, ranks in zip(RANKS[size], zip(*run_ranks(size, worker), strict=True), strict=True):
        case.compare(ranks)


@pytest.mark.ranks
def test_ranks_that_disagree_on_use_checkpoint_and_on_gradients_still_meet():
    """One exchange each way whatever the flag; a rank without gradients takes part; transitions sent again."""
    case = Case((2, 2), truncate=3)

    def worker(rank: int):
        context = CPContext(dist.group.WORLD, save_transitions=False)
        leaves = {n: case.cut(n, x, rank).clone() for n, x in case.tensors().items()}
        wanted = {n: x.requires_grad_() for n, x in leaves.items() if not n.startswith("rope") and rank == 0}
        with count_exchanges() as seen:
            results = call(case, leaves, 2, context, use_checkpoint=rank == 0)
            case.rank_loss(rank, results).backward()
        assert seen.total == 2
        with torch.no_grad(), count_exchanges() as seen:
            assert not call(case, leaves, 2, context)["num"].requires_grad
        assert seen.total == 1
        return {n: x.detach() for n, x in results.items()}, {n: x.grad for n, x in wanted.items()}

    (first, grads), (second, none) = run_ranks(2, worker)
    assert not none
    for name in ("terminal_state_kv", "terminal_state_z"):
        assert torch.equal(first[name], second[name])
    _, expected = case.whole()
    for name in ("qkv", "beta", "decay"):
        own = case.cut(name, expected[name], 0)
        assert torch.allclose(grads[name], own, rtol=0, atol=1e-10 * float(expected[name].abs().max()))


@pytest.mark.ranks
def test_an_outer_checkpoint_repeats_one_exchange_in_the_same_order_on_all_ranks():
    """FC-D14: plain activation checkpointing around two calls runs their forward exchanges again, nothing else."""
    cases = [Case((1, 2), weights="qk"), Case((1, 2), camera=True, reverse=True)]

    def worker(rank: int):
        found, labels = [], []
        for case in cases:
            leaves = {n: case.cut(n, x, rank).clone() for n, x in case.tensors().items()}
            wanted = {n: x.requires_grad_() for n, x in leaves.items() if not n.startswith("rope")}
            with count_exchanges() as seen:
                results = checkpoint(call, case, leaves, case.counts[rank], dist.group.WORLD, use_reentrant=False)
                grads = torch.autograd.grad(case.rank_loss(rank, results), list(wanted.values()))
            labels.append([label.split()[-1] for label in seen.labels])
            found.append(({n: x.detach() for n, x in results.items()}, dict(zip(wanted, grads, strict=True))))
        return found, labels

    ranks = run_ranks(2, worker)
    for i, case in enumerate(cases):
        case.compare([found[i] for found, _ in ranks])
    assert all(labels == [["forward", "forward", "backward"]] * 2 for _, labels in ranks)


def test_inputs_are_left_alone():
    """FC-A02: nothing writes into an input; two backward calls on one graph agree to the last bit."""
    for case in (Case((3,), truncate=2), Case((3,), camera=True, truncate=2), Case((3,), query_tables=True)):
        leaves = case.leaves()
        copies = {n: x.detach().clone() for n, x in leaves.items()}
        loss = case.rank_loss(0, call(case, leaves, 3, ONE))
        wanted = [x for x in leaves.values() if x.requires_grad]
        first, second = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        assert all(torch.equal(x, copies[n]) for n, x in leaves.items())


def test_truncated_frames_get_exact_zeros_and_read_the_last_active_state():
    case = Case((4,), truncate=2, weights="")
    given = case.tensors()
    given["beta"][:, :, 2:], given["decay"][:, :, 2:] = float("nan"), float("nan")
    leaves = {n: x if n.startswith("rope") else x.requires_grad_() for n, x in given.items()}
    results = call(case, leaves, 4, ONE)
    kv = results["terminal_state_kv"].view(B, H, D, D).mT
    q = given["qkv"][:, 3 * S :, 0].clamp(min=0)
    angle_cos, angle_sin = given["rope_cos"][3 * S :, None], given["rope_sin"][3 * S :, None]
    qr = q * angle_cos + q[..., [1, 0, 3, 2]] * angle_sin
    assert torch.allclose(results["num"][:, 3 * S :], torch.einsum("bshd,bhdv->bshv", qr, kv), rtol=1e-10, atol=1e-12)
    sum(x.sum() for x in results.values()).backward()
    assert not leaves["qkv"].grad[:, 2 * S :, 1:].any()  # keys and values
    assert leaves["qkv"].grad[:, 2 * S :, 0].any()
    for name in ("beta", "decay"):
        assert not leaves[name].grad[:, :, 2:].any()
        assert torch.isfinite(leaves[name].grad).all()


@pytest.mark.parametrize("query_tables", [False, True])
@pytest.mark.parametrize(("dot_precision", "dtype", "expected"), [
    (0, torch.float32, torch.bfloat16), (0, torch.bfloat16, torch.bfloat16), (1, torch.bfloat16, torch.float32),
    (2, torch.float32, torch.float32), (2, torch.float64, torch.float64), (0, torch.float64, torch.bfloat16),
])  # fmt: skip
def test_dtypes_are_the_published_ones(dot_precision, dtype, expected, query_tables):
    """num and den in bf16 at dot_precision 0; terminal states never below fp32; gradients in the leaves' dtypes."""
    case = Case((3,), truncate=2, query_tables=query_tables)
    leaves = {n: x if n.startswith("rope") else x.to(dtype).requires_grad_() for n, x in case.tensors().items()}
    results = call(case, leaves, 3, ONE, dot_precision=dot_precision)
    assert results["num"].dtype == results["den"].dtype == expected
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert results["terminal_state_kv"].dtype == results["terminal_state_z"].dtype == wide
    assert results["terminal_state_kv"].is_contiguous()
    sum(x.double().sum() for x in results.values()).backward()
    assert all(x.grad.dtype == dtype for x in leaves.values() if x.requires_grad)
    exact, _ = Case((3,), truncate=2, query_tables=query_tables).whole()
    unit = max(torch.finfo(expected).eps, torch.finfo(dtype).eps)
    for name, x in results.items():  # inputs are rounded once, and a few operations deep
        assert float((x.detach().double() - exact[name]).abs().max()) <= 16 * unit * float(exact[name].abs().max())


def test_camera_results_have_the_dtype_of_q():
    case = Case((3,), camera=True, truncate=2)
    leaves = {n: x.bfloat16().requires_grad_() for n, x in case.tensors().items()}
    results = call(case, leaves, 3, ONE)
    assert results["out"].dtype == results["terminal_state_kv"].dtype == torch.bfloat16
    results["out"].sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 for x in leaves.values())


def test_defaults_are_the_published_ones():
    """Called with what has no default: dot_precision 0, k_scale 1, norm_eps 1e-5, eps and eps_recurrence ignored."""
    given = Case((2,)).tensors()
    names = ("qkv", "beta", "decay", "q_norm_weight", "k_norm_weight", "rope_cos", "rope_sin")
    arguments = [given[name] for name in names]
    bare = cp_fused_gdn_chunkwise_raw_autograd(*arguments, F=2, S=S, group=ONE)
    full = cp_fused_gdn_chunkwise_raw_autograd(*arguments, F=2, S=S, group=ONE, k_scale=1.0, norm_eps=1e-5, eps=7.0,
                                               dot_precision=0, reverse_rank_order=False)  # fmt: skip
    assert bare.num.dtype == torch.bfloat16
    assert torch.equal(bare.num, full.num)
    assert torch.equal(bare.den, full.den)
    assert bare.terminal_state_kv is None
    assert bare.terminal_state_z is None
    camera = Case((2,), camera=True).tensors()
    arguments = [camera[name] for name in ("q", "k", "v", "beta", "decay")]
    out, state = cp_fused_cam_gdn_num_autograd(*arguments, F=2, S=S, group=ONE)
    other, _ = cp_fused_cam_gdn_num_autograd(*arguments, F=2, S=S, group=ONE, eps_recurrence=7.0)
    assert state is None
    assert torch.equal(out, other)


@pytest.mark.parametrize("camera", [False, True])
@pytest.mark.parametrize(("given", "needs", "enabled", "expected"), [
    (None, True, True, True), (None, False, True, False), (None, True, False, False),
    (False, True, True, False), (True, False, False, True),
])  # fmt: skip
def test_use_checkpoint_is_on_where_gradients_are(monkeypatch, camera, given, needs, enabled, expected):
    """A single leaf is enough, a norm weight too."""
    seen = []
    run = gdn_cp.fused.run_fused
    monkeypatch.setattr(gdn_cp.fused, "run_fused", lambda calls, *x: seen.append(calls[0].recompute) or run(calls, *x))
    case = Case((2,), camera=camera, use_checkpoint=given)
    tensors = case.tensors()
    tensors["v" if camera else "k_norm_weight"].requires_grad_(needs)
    with torch.set_grad_enabled(enabled):
        call(case, tensors, 2, ONE)
    assert seen == [expected]


def test_strided_inputs():
    for case in (Case((3,)), Case((3,), camera=True), Case((3,), query_tables=True)):
        given = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in case.tensors().items()}
        expected, _ = case.whole()
        for name, x in call(case, given, 3, ONE).items():
            assert torch.allclose(x, expected[name], rtol=1e-10, atol=1e-12)


N = 3 * S
MAIN_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"qkv": torch.rand(B, N, 2, H, D)}, ValueError, r"qkv must have shape \[B, N, 3, H, D\], got \[2, 15, 2, 3, 4\]"),
    ({"qkv": torch.rand(B, N, H, D)}, ValueError, r"qkv must have shape \[B, N, 3, H, D\]"),
    ({"qkv": torch.rand(B, 14, 3, H, D)}, ValueError, r"qkv must have N = F\*S = 3\*5 = 15 tokens, got 14"),
    ({"qkv": torch.zeros(B, N, 3, H, D, dtype=torch.int64)}, ValueError, "qkv must have dtype"),
    ({"beta": torch.rand(B, H, 3)}, ValueError, r"beta must have shape \[B, H, F, S\]"),
    ({"decay": torch.rand(B, H, 2)}, ValueError, r"decay must have shape \[B, H, F\]"),
    ({"q_norm_weight": torch.rand(H)}, ValueError, r"q_norm_weight must have shape \[H\*D\]"),
    ({"rope_cos": torch.rand(N, D // 2)}, ValueError, r"rope_cos must have shape \[N, D\] = \[15, 4\], got \[15, 2\]"),
    ({"rope_sin": None}, TypeError, "rope_sin must be a torch.Tensor"),
    ({"rope_sin_q": torch.rand(N - 1, D)}, ValueError, r"rope_sin_q must have shape \[N, D\]"),
    ({"rope_cos": torch.zeros(N, D, dtype=torch.int64)}, ValueError, "rope_cos must have dtype"),
    ({"k_scale": 0.0}, ValueError, "k_scale must be a finite number > 0"),
    ({"norm_eps": -1.0}, ValueError, "norm_eps must be a finite number >= 0"),
    ({"dot_precision": 3}, ValueError, r"dot_precision must be 0 \(bf16\), 1 \(tf32\) or 2 \(ieee\), got 3"),
    ({"dot_precision": "bf16"}, TypeError, "dot_precision must be an int, got str"),
    ({"truncate_to_active": 4}, ValueError, r"truncate_to_active must lie in 1 ... T_local \* P = 3, got 4"),
    ({"truncate_to_active": 0}, ValueError, r"truncate_to_active must lie in 1 ... T_local \* P = 3, got 0"),
    ({"truncate_to_active": 2, "reverse_rank_order": True}, NotImplementedError, "from the first rank to the last"),
    ({"group": "world"}, TypeError, "group must be a torch.distributed.ProcessGroup or a CPContext, got str"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), MAIN_ERRORS)
def test_errors(changes, kind, text):
    given = {n: x.float() for n, x in Case((3,)).tensors().items()}
    with pytest.raises(kind, match=text):
        cp_fused_gdn_chunkwise_raw_autograd(**({"F": 3, "S": S, "group": ONE} | given | changes))


def test_an_odd_head_width_has_no_pairs():
    qkv, table = torch.rand(1, 2, 3, 1, 3), torch.rand(2, 3)
    with pytest.raises(ValueError, match="rope_cos needs an even head width, got D = 3"):
        cp_fused_gdn_chunkwise_raw_autograd(qkv, torch.rand(1, 1, 2, 1), torch.rand(1, 1, 2), None, None, table, table,
                                            F=2, S=1, group=ONE)  # fmt: skip


CAMERA_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": torch.rand(B, H, D, N - 1)}, ValueError, r"q, k and v must have the same shape \[B, H, D, N\], got .*14\]"),
    ({"q": None}, TypeError, "q must be a torch.Tensor"),
    ({"k": torch.rand(B, H, D, N).double()}, ValueError, "k must have dtype float32, got float64"),
    ({"S": 2}, ValueError, r"q must have N = F\*S = 3\*2 = 6 tokens, got 15"),
    ({"beta": torch.rand(B, H)}, ValueError, r"beta must have shape \[B, H, F, S\] or \[B, H, F\], got \[2, 3\]"),
    ({"beta": torch.rand(B, H, 2)}, ValueError, r"beta must have shape \[B, H, F\] = \[2, 3, 3\], got \[2, 3, 2\]"),
    ({"beta": torch.rand(B, H, 3, 2)}, ValueError, r"beta must have shape \[B, H, F, S\] = \[2, 3, 3, 5\]"),
    ({"beta": 1.0}, TypeError, "beta must be a torch.Tensor"),
    ({"decay": torch.rand(B, H)}, ValueError, r"decay must have shape \[B, H, F\]"),
    ({"truncate_to_active": 4}, ValueError, "truncate_to_active must lie in"),
    ({"truncate_to_active": 2, "reverse_rank_order": True}, NotImplementedError, "from the first rank to the last"),
    ({"group": None}, TypeError, "group must be a torch.distributed.ProcessGroup or a CPContext, got NoneType"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), CAMERA_ERRORS)
def test_camera_errors(changes, kind, text):
    given = {n: x.float() for n, x in Case((3,), camera=True).tensors().items()}
    with pytest.raises(kind, match=text):
        cp_fused_cam_gdn_num_autograd(**({"F": 3, "S": S, "group": ONE} | given | changes))


def test_camera_operands_have_four_dims():
    x = torch.rand(B, H, D)
    with pytest.raises(ValueError, match=r"q must have shape \[B, H, D, N\], got \[2, 3, 4\]"):
        cp_fused_cam_gdn_num_autograd(x, x, x, torch.rand(B, H, 3), torch.rand(B, H, 3), F=3, S=S, group=ONE)


@pytest.mark.ranks
def test_ranks_that_disagree_fail_alike():
    def outcomes(case: Case, changes: dict[str, Any], counts: tuple[int, int] = (2, 2)):
        def worker(rank: int):
            given = {n: case.cut(n, x, rank) for n, x in case.tensors().items()}
            try:
                call(case, given, counts[rank], dist.group.WORLD, **(changes if rank == 1 else {}))
            except Exception as error:  # noqa: BLE001  whatever it is, it is looked at
                return type(error).__name__, str(error)
            return "nothing", ""

        return run_ranks(2, worker)

    for kind, message in outcomes(Case((2, 2)), {"k_scale": 0.5}):
        assert kind == "RuntimeError"
        assert message == (
            "cp_fused_gdn_chunkwise_raw_autograd: ranks disagree on k_scale: rank 0 has 0.6, rank 1 has 0.5"
        )
    for kind, message in outcomes(Case((2, 2), camera=True), {"reverse_rank_order": True}):
        assert kind == "RuntimeError"
        assert "cp_fused_cam_gdn_num_autograd: ranks disagree on reverse" in message
    for kind, message in outcomes(Case((2, 1), truncate=2), {}, (2, 1)):
        assert kind == "ValueError"
        assert "ranks disagree on T_local: rank 0 has 2, rank 1 has 1" in message


def test_comparison_can_fail():
    case = Case((2,))
    results, grads = on_rank(case, 0, ONE)
    with pytest.raises(AssertionError, match="den of rank 0"):
        case.compare([({**results, "den": results["den"] + 1e-6}, grads)])
    with pytest.raises(AssertionError, match="gradient of decay"):
        case.compare([(results, {**grads, "decay": -grads["decay"]})])
