"""The published scan against a loop over all frames: ranks and simulation, every gradient, truncation, errors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from gdn_cp import CPContext, CpFrameGdnScanResult, count_exchanges, cp_frame_gdn_scan, simulate

BH, D = 3, 4
NAMES = ("W_kv", "U_kv", "W_z", "U_z")
Case = tuple[tuple[int, ...], bool, int | None]  # frames of each rank, reverse, truncate_to_active


def clip(frames: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """W_kv, U_kv, W_z, U_z of all frames in the order of states; W is far from symmetric and contracts a little."""
    generator = torch.Generator().manual_seed(frames)
    shapes = ((BH, frames, D, D),) * 3 + ((BH, frames, D),)
    scales = (0.35, 1.0, 0.35, 1.0)
    return [
        (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def eager(given: Sequence[Tensor], truncate: int | None) -> list[Tensor]:
    """Transcribe the documented recurrence frame by frame: right form for kv, left form for z; terminal states last."""
    W_kv, U_kv, W_z, U_z = given
    S_kv, S_z = torch.zeros_like(U_kv[:, 0]), torch.zeros_like(U_z[:, 0])
    all_kv, all_z = [], []
    for t in range(W_kv.shape[1]):
        if truncate is None or t < truncate:
            S_kv = torch.einsum("bij,bjk->bik", S_kv, W_kv[:, t]) + U_kv[:, t]
            S_z = torch.einsum("bij,bj->bi", W_z[:, t], S_z) + U_z[:, t]
        all_kv.append(S_kv)
        all_z.append(S_z)
    return [torch.stack(all_kv, 1), torch.stack(all_z, 1), S_kv, S_z]


def spans(counts: tuple[int, ...], reverse: bool) -> list[slice]:
    """Frames of each rank, counted in the order of states."""
    order = counts[::-1] if reverse else counts
    starts = [0, *itertools.accumulate(order)]
    found = [slice(a, b) for a, b in itertools.pairwise(starts)]
    return found[::-1] if reverse else found


def upstream(x: Tensor, rank: int | None = None) -> Tensor:
    """An incoming gradient with strides of its own; another one on every rank."""
    generator = torch.Generator().manual_seed(x.ndim + (0 if rank is None else 10 * (rank + 1)))
    up = torch.randn((*x.shape[::-1], 2), generator=generator, dtype=torch.float64)
    return up[..., 0].permute(*range(x.ndim)[::-1]).to(x.dtype)


def whole(case: Case, wanted: Sequence[bool] = (True,) * 4) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and gradients of the whole clip, with the loss that the ranks share."""
    counts, _, truncate = case
    leaves = [x.requires_grad_() for x in clip(sum(counts))]
    results = eager(leaves, truncate)
    pairs = [(x, upstream(x)) for x, use in zip(results[:2], wanted, strict=False) if use]
    if truncate is not None:
        for x, use in zip(results[2:], wanted[2:], strict=True):
            pairs += [(x, upstream(x, rank)) for rank in range(len(counts)) if use]
    loss = sum(((x * up).sum() for x, up in pairs), torch.zeros((), dtype=torch.float64))
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return results, [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def rank_loss(case: Case, rank: int, found: Sequence[Tensor], wanted: Sequence[bool] = (True,) * 4) -> Tensor:
    """This rank's part of the loss of `whole`."""
    counts, reverse, _ = case
    span = spans(counts, reverse)[rank]
    loss = torch.zeros((), dtype=torch.float64)
    for i, (x, use) in enumerate(zip(found, wanted, strict=False)):
        if use and i < 2:
            shape = (x.shape[0], sum(counts), *x.shape[2:])
            loss = loss + (x * upstream(torch.empty(shape, dtype=x.dtype))[:, span]).sum()
        elif use:
            loss = loss + (x * upstream(x, rank)).sum()
    return loss


def compare(case: Case, ranks: Sequence[tuple[Sequence[Tensor], Sequence[Tensor | None]]], bound: float = 1e-12,
            wanted: Sequence[bool] = (True,) * 4) -> None:  # fmt: skip
    results, expected = whole(case, wanted)
    for rank, (found, grads) in enumerate(ranks):
        span = spans(case[0], case[1])[rank]
        for i, x in enumerate(found):
            close(x, results[i][:, span] if i < 2 else results[i], results[i], bound)
        for x, y in zip(grads, expected, strict=True):
            close(x, y[:, span], y, bound)


def close(found: Tensor | None, expected: Tensor, scale: Tensor, bound: float) -> None:
    assert found is not None
    assert found.shape == expected.shape
    if expected.numel():
        assert float((found.double() - expected).detach().abs().max()) <= bound * float(scale.detach().abs().max())


def run_case(case: Case, rank: int, context: CPContext | dist.ProcessGroup, wanted: Sequence[bool] = (True,) * 4):
    """Results and gradients of one rank."""
    counts, reverse, truncate = case
    leaves = [x[:, spans(counts, reverse)[rank]].clone().requires_grad_() for x in clip(sum(counts))]
    found = cp_frame_gdn_scan(*leaves, context, reverse, truncate)
    assert isinstance(found, CpFrameGdnScanResult) == (truncate is not None)
    grads = torch.autograd.grad(rank_loss(case, rank, found, wanted), leaves)
    return [x.detach() for x in found], list(grads)


SIMULATED: list[Case] = [
    *(((a, b, c), reverse, None) for reverse in (False, True) for a, b, c in itertools.product((0, 1, 3), repeat=3)
      if a + b + c),
    *(((2, 2, 2), False, k) for k in range(1, 7)),
    *(((3,), False, k) for k in (None, 1, 2, 3)),
    ((3, 2), True, None), ((4,), True, None),
]  # fmt: skip


@pytest.mark.parametrize("save_transitions", [True, False])
@pytest.mark.parametrize("case", SIMULATED, ids=str)
def test_simulated_ranks_equal_a_loop_over_all_frames(case, save_transitions):
    """Uneven and empty ranks, both rank orders, truncation on, before and after a cut; 1e-12 in fp64."""
    counts, reverse, truncate = case
    leaves = [[x[:, span].clone().requires_grad_() for x in clip(sum(counts))] for span in spans(counts, reverse)]
    found = simulate.scan([tuple(x) for x in leaves], reverse=reverse, truncate_to_active=truncate,
                          save_transitions=save_transitions)  # fmt: skip
    loss = sum((rank_loss(case, rank, x) for rank, x in enumerate(found)), torch.zeros((), dtype=torch.float64))
    grads = torch.autograd.grad(loss, [x for rank in leaves for x in rank])
    compare(case, [(x, grads[4 * rank : 4 * rank + 4]) for rank, x in enumerate(found)])


@pytest.mark.ranks
def test_ranks_equal_a_loop_over_all_frames():
    """On gloo: a process group and a context, kept and sent transitions, one exchange each way."""
    cases: list[Case] = [
        ((2, 1, 3), False, None),
        ((0, 3, 2), True, None),
        ((2, 2, 2), False, 3),
        ((2, 2, 2), False, 6),
    ]

    def worker(rank: int):
        found = []
        for case in cases:
            group = dist.group.WORLD
            for context in (group, CPContext(group, save_transitions=False)):
                with count_exchanges() as seen:
                    found.append(run_case(case, rank, context))
                assert seen.labels == ["cp_frame_gdn_scan forward", "cp_frame_gdn_scan backward"]
                again = 2 * D * D if context is not group else 0
                final = D * D + D if case[2] is not None else 0
                for sent, promised in zip(seen.sent, (3 * D * D + D, D * D + D + final + again), strict=True):
                    assert 0 <= sent - 8 * BH * promised < 16 * 6  # blocks start on 16 bytes
        return found

    for i, ranks in enumerate(zip(*run_ranks(3, worker), strict=True)):
        compare(cases[i // 2], ranks)


@pytest.mark.ranks
def test_two_ranks_no_grad_a_frozen_rank_and_terminal_states_equal_to_the_last_bit():
    case: Case = ((2, 2), False, 3)

    def worker(rank: int):
        with torch.no_grad(), count_exchanges() as seen:
            quiet = cp_frame_gdn_scan(*(x[:, spans(*case[:2])[rank]] for x in clip(4)), dist.group.WORLD, False, 3)
        assert seen.total == 1
        assert not quiet[0].requires_grad
        leaves = [x[:, spans(*case[:2])[rank]].clone().requires_grad_(rank == 0) for x in clip(4)]
        found = cp_frame_gdn_scan(*leaves, dist.group.WORLD, False, 3)
        assert found[0].requires_grad
        rank_loss(case, rank, found).backward()
        return quiet, [x.grad for x in leaves]

    (first, grads), (second, none) = run_ranks(2, worker)
    assert none == [None] * 4
    for x, y in zip(first[2:], second[2:], strict=True):
        assert torch.equal(x, y)
    _, expected = whole(case)
    for x, y in zip(grads, expected, strict=True):
        close(x, y[:, :2], y, 1e-12)


@pytest.mark.parametrize("wanted", [(True, False, False, False), (False, True, False, False),
                                    (False, False, True, False), (False, False, False, True)], ids=str)  # fmt: skip
def test_outputs_that_no_loss_uses_count_as_zero(wanted):
    case: Case = ((2, 2), False, 3)
    leaves = [[x[:, span].clone().requires_grad_() for x in clip(4)] for span in spans(*case[:2])]
    found = simulate.scan([tuple(x) for x in leaves], truncate_to_active=3)
    loss = sum((rank_loss(case, rank, x, wanted) for rank, x in enumerate(found)), torch.zeros((), dtype=torch.float64))
    grads = torch.autograd.grad(loss, [x for rank in leaves for x in rank])
    compare(case, [(x, grads[4 * rank : 4 * rank + 4]) for rank, x in enumerate(found)], wanted=wanted)


@pytest.mark.parametrize(
    "case", [((3,), False, None), ((2,), False, 1), ((1, 2, 1), True, None), ((2, 2, 2), False, 4)]
)
def test_gradcheck(case):
    """One rank through the published function, three through the simulation; W is not symmetric."""
    counts, reverse, truncate = case
    leaves = [x[:1, span, :2, :2].clone().requires_grad_() if x.ndim == 4 else x[:1, span, :2].clone().requires_grad_()
              for span in spans(counts, reverse) for x in clip(sum(counts))]  # fmt: skip

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        if len(counts) == 1:
            return tuple(cp_frame_gdn_scan(*tensors, CPContext.single(), reverse, truncate))
        shards = [tuple(tensors[4 * i : 4 * i + 4]) for i in range(len(counts))]
        return tuple(x for rank in simulate.scan(shards, reverse=reverse, truncate_to_active=truncate) for x in rank)

    assert torch.autograd.gradcheck(function, leaves)


def test_frames_beyond_the_active_ones_are_not_read_and_get_exact_zeros():
    """They may hold anything; states there are those of frame K - 1 to the last bit."""
    given = clip(6)
    for x in given:
        x[:, 3:] = float("nan")
    leaves = [[x[:, span].clone().requires_grad_() for x in given] for span in spans((2, 2, 2), False)]
    found = simulate.scan([tuple(x) for x in leaves], truncate_to_active=3)
    assert torch.equal(found[1].S_kv_all[:, 0], found[1].S_kv_all[:, 1])
    assert torch.equal(found[1].S_z_all[:, 1], found[2].S_z_all[:, 0])
    sum(x.sum() for rank in found for x in rank).backward()
    for x in leaves[1]:
        assert torch.isfinite(x.grad).all()
        assert not x.grad[:, 1].any()
        assert x.grad[:, 0].any()
    assert not any(x.grad.any() for x in leaves[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_have_the_dtype_of_the_inputs_and_are_computed_in_fp32(dtype):
    """Each state is the fp64 state of the same inputs, rounded: fp32 carries 2^-24 a step, the dtype rounds once."""
    given = clip(5, dtype)
    wide = eager([x.double() for x in given], None)
    leaves = [x.requires_grad_() for x in given]
    found = cp_frame_gdn_scan(*leaves, CPContext.single())
    for x, y in zip(found, wide, strict=False):
        assert x.dtype == dtype
        assert x.is_contiguous()
        unit = torch.finfo(dtype).eps / 2 + 5 * torch.finfo(torch.float32).eps
        assert float((x.double() - y).detach().abs().max()) <= unit * float(y.abs().max())
    grads = torch.autograd.grad(sum(x.float().sum() for x in found), leaves)
    assert all(g.dtype == dtype for g in grads)


def test_strided_inputs_and_a_second_backward():
    """FC-A02, FC-A03, FC-S12."""
    given = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in clip(3)]
    for x, y in zip(cp_frame_gdn_scan(*given, CPContext.single()), eager(given, None), strict=False):
        close(x, y, y, 1e-12)
    leaves = [x.requires_grad_() for x in clip(3)]
    S_kv, _ = cp_frame_gdn_scan(*leaves, CPContext.single())
    (first,) = torch.autograd.grad(S_kv.sum(), leaves[:1], retain_graph=True)
    (second,) = torch.autograd.grad(S_kv.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        second.sum().backward()
    (third,) = torch.autograd.grad(S_kv.sum(), leaves[:1])
    assert torch.equal(first, third)


def test_result_of_four_fields_does_not_unpack_into_two():
    result = cp_frame_gdn_scan(*clip(3), CPContext.single(), truncate_to_active=2)
    assert result._fields == ("S_kv_all", "S_z_all", "terminal_state_kv", "terminal_state_z")
    with pytest.raises(ValueError, match="too many values to unpack"):
        _, _ = result


def test_errors():
    """FC-D16: each refused combination, in the lowest public function."""
    W_kv, U_kv, W_z, U_z = clip(3)
    one = CPContext.single()
    with pytest.raises(NotImplementedError, match="truncate_to_active is for states that pass from the first rank"):
        cp_frame_gdn_scan(W_kv, U_kv, W_z, U_z, one, True, 2)
    for k in (0, 4):
        with pytest.raises(ValueError, match=rf"truncate_to_active must lie in 1 ... T_local \* P = 3, got {k}"):
            cp_frame_gdn_scan(W_kv, U_kv, W_z, U_z, one, False, k)
    with pytest.raises(TypeError, match="truncate_to_active must be an int or None, got float"):
        cp_frame_gdn_scan(W_kv, U_kv, W_z, U_z, one, False, 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="group must be a torch.distributed.ProcessGroup or a CPContext, got NoneType"):
        cp_frame_gdn_scan(W_kv, U_kv, W_z, U_z, None)
    with pytest.raises(ValueError, match=r"W_kv must have shape \[B\*H, T_local, D, D\], got \[3, 4, 4\]"):
        cp_frame_gdn_scan(W_kv[0], U_kv, W_z, U_z, one)
    with pytest.raises(ValueError, match=r"W_kv must have shape \[B\*H, T_local, D, D\] = \[3, 3, 4, 4\]"):
        cp_frame_gdn_scan(W_kv[..., 1:, :], U_kv, W_z, U_z, one)
    with pytest.raises(ValueError, match=r"W_z must have shape .* got \[0\]"):
        cp_frame_gdn_scan(W_kv, U_kv, torch.empty(0), torch.empty(0), one)  # a bundle made with skip_z
    with pytest.raises(ValueError, match=r"U_z must have shape \[B\*H, T_local, D\] = \[3, 3, 4\], got \[3, 3\]"):
        cp_frame_gdn_scan(W_kv, U_kv, W_z, U_z[..., 0], one)
    with pytest.raises(ValueError, match="U_z must have dtype float64, got float32"):
        cp_frame_gdn_scan(W_kv, U_kv, W_z, U_z.float(), one)
    with pytest.raises(ValueError, match="W_kv must have dtype .*, got int64"):
        cp_frame_gdn_scan(W_kv.long(), U_kv, W_z, U_z, one)
    with pytest.raises(ValueError, match=r"U_kv must be on the device of W_kv \(cpu\), got meta"):
        cp_frame_gdn_scan(W_kv, U_kv.to("meta"), W_z, U_z, one)
    with pytest.raises(ValueError, match=r"truncate_to_active needs the same T_local on every rank, got \[1, 2\]"):
        simulate.scan([tuple(clip(1)), tuple(clip(2))], truncate_to_active=2)


@pytest.mark.ranks
def test_ranks_that_disagree_fail_alike():
    """T_local that differs under truncation is a ValueError on all, any other disagreement a RuntimeError."""

    def outcomes(**changes: object):
        def worker(rank: int):
            frames = changes.get("frames", (2, 2))[rank]
            truncate = changes.get("truncate", (None, None))[rank]
            reverse = changes.get("reverse", (False, False))[rank]
            try:
                cp_frame_gdn_scan(*clip(frames), dist.group.WORLD, reverse, truncate)
            except Exception as error:  # noqa: BLE001  whatever it is, it is looked at
                return type(error).__name__, str(error)
            return "nothing", ""

        return run_ranks(2, worker)

    for kind, message in outcomes(frames=(2, 3), truncate=(2, 2)):
        assert kind == "ValueError"
        assert message == "cp_frame_gdn_scan: ranks disagree on T_local: rank 0 has 2, rank 1 has 3"
    for kind, message in outcomes(truncate=(None, 3)):
        assert kind == "RuntimeError"
        assert "ranks disagree on truncate_to_active: rank 0 has None, rank 1 has 3" in message
    for kind, message in outcomes(reverse=(True, False)):
        assert kind == "RuntimeError"
        assert "ranks disagree on reverse" in message
    for rank, (kind, message) in enumerate(outcomes(truncate=(3, 9))):
        assert kind == "ValueError"
        assert message.endswith("truncate_to_active must lie in 1 ... T_local * P = 4, got 9")
        assert ("rank 1: " in message) == (rank == 0)


def test_comparison_can_fail():
    with pytest.raises(AssertionError):
        compare(((2,), False, None), [([x + 1e-9 for x in eager(clip(2), None)[:2]], whole(((2,), False, None))[1])])
