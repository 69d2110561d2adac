"""What autograd, its modes and its transforms may ask of an operation."""

from itertools import combinations

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same
from frame_gdn_cases import DIRECTIONS, KINDS, MASK, NO_GRADIENT, STARTS, Case, draw, gradients, leaves, run, upstream
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdn_kernels import FrameState, frame_gdn, frame_gdn_raw

TOLERANCE = 1e-12
LEAVES = ("qkv", "beta", "decay", "q_norm_weight", "k_norm_weight", "kv", "z")


def small(**options: object) -> Case:
    """Return a small case."""
    return draw((1, 2, 3, 2, 4), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_left_alone_and_two_backwards_agree_bitwise(kind: str) -> None:
    """FC-A02: also behind an activation, whose saved result must survive."""
    case = draw()
    before = {name: value.detach().clone() for name, value in case.items()}
    active = {**case, "qkv": case["qkv"].relu()}
    results = run(kind, active, "bidirectional", frame_valid=MASK, chunk_starts=STARTS)
    incoming = upstream(results)
    sent = {name: value.clone() for name, value in incoming.items()}
    first = gradients(results, incoming, case, keep=True)
    second = gradients(results, incoming, case)
    for name, value in first.items():
        assert value is None or assert_same(second[name], value, name) is None
    for name, value in (*case.items(), *incoming.items()):
        assert_same(value.detach(), {**before, **sent}[name], name)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_runs_repeat_bitwise(direction: str) -> None:
    """Ten runs, random incoming gradients, every gradient."""
    hashes = set()
    for _ in range(10):
        case = draw(dtype=torch.float32)
        results = run("output", case, direction)
        grads = gradients(results, upstream(results), case)
        values = [*results.values(), *(g for g in grads.values() if g is not None)]
        hashes.add(tuple(value.detach().numpy().tobytes() for value in values))
    assert len(hashes) == 1


def test_any_subset_of_inputs_may_need_a_gradient() -> None:
    """FC-A05: those that do get what they get when all do; with none, nothing is recorded."""
    everything = small()
    results = run("output", everything, "bidirectional")
    incoming = upstream(results)
    expected = gradients(results, incoming, everything)
    case = {name: value.detach().clone() for name, value in everything.items()}
    assert not any(value.requires_grad for value in run("output", case, "bidirectional").values())
    for count in range(1, len(LEAVES) + 1):
        for needed in combinations(LEAVES, count):
            for name in LEAVES:
                case[name].requires_grad_(name in needed)
            results = run("output", case, "bidirectional")
            live = {name: value for name, value in results.items() if value.requires_grad}
            found = gradients(live, incoming, case)
            assert_all_close(found, {name: expected[name] for name in case if name in needed}, TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_right(kind: str) -> None:
    """FC-A03: the torch implementation has them."""
    without = ("q_norm_weight", "k_norm_weight", "z", "cos", "sin") if kind == "numerator" else ()
    case = draw((1, 1, 2, 2, 2), without=without)
    free = [name for name in case if name not in NO_GRADIENT]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        full = {**case, **dict(zip(free, values, strict=True))}
        return tuple(run(kind, full, "bidirectional", **({"eps": 0.1} if kind == "output" else {})).values())

    assert torch.autograd.gradgradcheck(function, [case[name] for name in free])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward_ad
@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_agrees_with_reverse_mode(kind: str) -> None:
    """FC-A12: a product with the Jacobian from either side."""
    case = draw()
    free = [name for name in case if name not in NO_GRADIENT and not (kind == "numerator" and "norm" in name)]
    free = [name for name in free if not (kind == "numerator" and name == "z")]
    values = tuple(case[name].detach() for name in free)
    tangents = tuple(torch.randn_like(value) for value in values)

    def function(*values: Tensor) -> dict[str, Tensor]:
        return run(kind, {**case, **dict(zip(free, values, strict=True))}, "bidirectional")

    results, forward = torch.func.jvp(function, values, tangents)
    incoming = upstream(results)
    back = torch.func.vjp(function, *values)[1](incoming)
    one = sum((forward[name] * incoming[name]).sum() for name in results)
    other = sum((gradient * tangent).sum() for gradient, tangent in zip(back, tangents, strict=True))
    assert_close(one, other, TOLERANCE)


def test_vmap_maps_over_stacked_calls() -> None:
    """FC-A12: and over per-sample gradients."""
    cases = [small(seed=seed) for seed in range(3)]
    stacked = [torch.stack([case[name].detach() for case in cases]) for name in ("qkv", "beta", "decay")]

    def output(qkv: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return frame_gdn(qkv, beta, decay, direction="bidirectional", k_scale=0.4).output

    def loss(*values: Tensor) -> Tensor:
        return output(*values).square().sum()

    for f, g in ((output, output), (torch.func.grad(loss), torch.func.grad(loss))):
        found = torch.vmap(f)(*stacked)
        assert_close(found, torch.stack([g(*(x[i] for x in stacked)) for i in range(3)]), TOLERANCE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    """FC-A10: both modes, bit for bit, in and out of autocast."""
    for enabled in (False, True):
        case = draw(dtype=torch.float32)
        copy = leaves(case)

        def output(qkv: Tensor, beta: Tensor, decay: Tensor, source: Case = case, enabled: bool = enabled) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                full = {**source, "qkv": qkv * 1.5, "beta": beta, "decay": decay}
                return run("output", full, "bidirectional", chunk_starts=STARTS, frame_valid=MASK)["output"]

        names = ("qkv", "beta", "decay")
        plain = {"output": output(*(copy[name] for name in names), source=copy)}
        found = {"output": checkpoint(output, *(case[name] for name in names), use_reentrant=reentrant)}
        assert_same(found["output"], plain["output"])
        incoming = upstream(plain)
        found["output"].backward(incoming["output"])
        wanted = gradients(plain, incoming, copy)
        for name in names:
            assert_same(case[name].grad, wanted[name], name)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_give_the_same_values(mode: object) -> None:
    """FC-A10: nothing depends on the grad mode."""
    case = draw(dtype=torch.float32)
    plain = run("output", case, "bidirectional")
    with mode():
        found = run("output", case, "bidirectional")
        for name, value in plain.items():
            assert_same(found[name], value.detach(), name)
            assert not found[name].requires_grad


def test_training_through_states_carried_over_calls() -> None:
    """FC-A07: truncated and full backpropagation through time differ by exactly the carried gradient."""
    case = small()
    start = FrameState(case["kv"], case["z"])
    first = frame_gdn_raw(
        case["qkv"], case["beta"], case["decay"], initial_state=start, output_final_state=True, k_scale=0.4
    )
    cut = FrameState(*(x.detach().requires_grad_() for x in first.final_state))
    second = frame_gdn_raw(case["qkv"], case["beta"], case["decay"], initial_state=cut, k_scale=0.4)
    loss = second.numerator.square().sum() + second.denominator.square().sum()
    carried = torch.autograd.grad(loss, cut)
    through = torch.autograd.grad(first.final_state, start, carried)
    again = frame_gdn_raw(
        case["qkv"], case["beta"], case["decay"], initial_state=start, output_final_state=True, k_scale=0.4
    )
    whole = frame_gdn_raw(
        case["qkv"].detach(), case["beta"], case["decay"], initial_state=again.final_state, k_scale=0.4
    )
    expected = torch.autograd.grad(whole.numerator.square().sum() + whole.denominator.square().sum(), start)
    for here, there in zip(through, expected, strict=True):
        assert_close(here, there, TOLERANCE)
