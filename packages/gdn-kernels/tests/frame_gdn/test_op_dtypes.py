"""Sixteen-bit and mixed dtypes, autocast, ranges: errors are those of rounding in and out, never of the recurrence."""

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same, error
from frame_gdn_cases import DIRECTIONS, KINDS, Case, cast, draw, gradients, leaves, run, run_sequential, upstream
from rounding import Exact, exact, half_ulp
from torch import Tensor, nn

from gdn_kernels import FrameState, frame_gdn

HALVES = [torch.float16, torch.bfloat16]
OF_QKV = ("qkv", "q_norm_weight", "k_norm_weight")


def bound(truth: Exact, dtype: torch.dtype) -> float:
    """Return the error of fp32 arithmetic plus that of rounding its result once."""
    return truth.fp32_error + (half_ulp(dtype) if dtype in HALVES else 0.0)


def compare(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], truth: Exact) -> None:
    """Compare each tensor within what its own dtype allows."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None
        else:
            assert_close(found[name], value, bound(truth, found[name].dtype), name)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_as_exact_as_their_dtypes(kind: str, dtype: torch.dtype, direction: str) -> None:
    """FC-A08: fp32 gates and tables beside 16-bit qkv and weights; every gradient has the dtype of its input."""
    without = ("q_norm_weight", "k_norm_weight", "z", "cos", "sin") if kind == "numerator" else ()
    case = draw(dtype=torch.float32, without=without + (("kv", "z") if direction == "reverse" else ()))
    case = cast(case, dtype, *OF_QKV)
    if kind == "numerator":
        case["qkv"] = (0.4 * case["qkv"].detach()).requires_grad_()
    options = {"eps": 0.05} if kind == "output" else {}
    found = run(kind, case, direction, **options)
    for name, value in found.items():
        assert value.dtype == (dtype if name == "output" else torch.float32), name
    incoming = upstream(found)
    truth = exact(kind, case, direction, incoming, **options)
    compare(found, truth.results, truth)
    grads = gradients(found, incoming, case)
    for name, gradient in grads.items():
        assert gradient is None or gradient.dtype == case[name].dtype
    compare(grads, truth.gradients, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gates_and_weights_of_any_dtype_mean_their_values(dtype: torch.dtype) -> None:
    """FC-N14: 16-bit gates are converted, not computed with; the result is that of fp32 gates of the same value."""
    names = ("beta", "decay", "q_norm_weight", "k_norm_weight")
    case = cast(draw(dtype=torch.float32), dtype, *names)
    same = cast(case, torch.float32, *names)
    found, expected = (run("raw", x, "bidirectional") for x in (case, same))
    for name, value in expected.items():
        assert_same(found[name], value, name)
    grads, wanted = gradients(found, upstream(found), case), gradients(expected, upstream(expected), same)
    for name, gradient in grads.items():
        assert_same(gradient, wanted[name].to(case[name].dtype), name)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_changes_no_number_forward_or_backward(dtype: torch.dtype) -> None:
    """FC-A08: fp32 parameters and gates, 16-bit qkv from a linear layer, fp32 upstream for a 16-bit output."""
    case = cast(draw(dtype=torch.float32), dtype, "qkv")
    plain = run("output", case, "bidirectional")
    with torch.autocast("cpu", dtype=dtype):
        found = run("output", case, "bidirectional")
    for name, value in plain.items():
        assert_same(found[name], value, name)
    incoming = upstream(plain)
    wanted = gradients(plain, incoming, case)
    for name, gradient in gradients(found, {k: v.float() for k, v in incoming.items()}, case).items():
        assert_same(gradient, wanted[name], name)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_layer_under_autocast_trains(dtype: torch.dtype) -> None:
    """FC-A08: projection, gates and weights of a module, everything in one autocast region."""
    layer, gate = nn.Linear(12, 36), nn.Linear(12, 3)
    weight, x = nn.Parameter(torch.ones(12)), torch.randn(2, 6, 12)
    with torch.autocast("cpu", dtype=dtype):
        qkv = layer(x).unflatten(-1, (3, 3, 4))
        beta = gate(x).sigmoid().unflatten(1, (3, 2)).permute(0, 3, 1, 2)
        result = frame_gdn(qkv, beta, beta.mean(-1), q_norm_weight=weight, k_norm_weight=weight, k_scale=0.3)
        loss = result.output.float().square().mean()
    loss.backward()
    assert qkv.dtype == result.output.dtype == dtype
    for parameter in (*layer.parameters(), *gate.parameters(), weight):
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0


def test_error_of_sixteen_bit_inputs_does_not_grow_with_the_clip() -> None:
    """FC-N05: sigmoid gates computed in a bf16 module; frame by frame the error stays that of one rounding."""
    frames, spatial = 80, 3
    case = draw((1, 2, frames, spatial, 4), dtype=torch.float32, without=("kv", "z"))
    logits = 5 + torch.randn(1, 2, frames, spatial + 1)
    gates = logits.bfloat16().float().sigmoid()
    case = leaves({**case, "beta": gates[..., 1:], "decay": gates[..., 0]})
    case = cast(case, torch.bfloat16, *OF_QKV)
    found = run("output", case)
    truth = exact("output", case, "forward", upstream(found))
    by_frame = (x["output"].detach().unflatten(1, (frames, spatial)).movedim(1, 0) for x in (found, truth.results))
    errors = [error(*pair) for pair in zip(*by_frame)]
    assert max(errors) <= bound(truth, torch.bfloat16)
    assert max(errors[60:]) <= 1.5 * max(errors[:20])


def test_a_clip_streamed_frame_by_frame_in_bf16_equals_one_call() -> None:
    """FC-N06 at this level: the state between calls is fp32, so nothing is rounded on the way."""
    case = cast(draw((1, 2, 40, 3, 4), dtype=torch.float32), torch.bfloat16, *OF_QKV)
    whole = run("raw", case)
    state, numerators = FrameState(case["kv"], case["z"]), []
    for f in range(40):
        tokens = slice(3 * f, 3 * f + 3)
        part = {"qkv": case["qkv"][:, tokens], "cos": case["cos"][tokens], "sin": case["sin"][tokens]}
        gates = {"beta": case["beta"][:, :, f : f + 1], "decay": case["decay"][:, :, f : f + 1]}
        found = run("raw", {**case, **part, **gates, **state._asdict()})
        state = FrameState(found["final_kv"], found["final_z"])
        numerators.append(found["numerator"])
    assert state.kv.dtype == state.z.dtype == torch.float32
    assert_close(torch.cat(numerators, 1), whole["numerator"], 8 * half_ulp(torch.float32))


def test_states_and_their_gradients_are_not_limited_to_the_range_of_the_inputs() -> None:
    """FC-N07: fp16 qkv; a state of 1e5 does not overflow, a state gradient of 2^-25 does not vanish."""
    case = cast(draw(dtype=torch.float32), torch.float16, *OF_QKV)
    with torch.no_grad():
        case["kv"].mul_(1e6)
    found = run("raw", case)
    truth = exact("raw", case, "forward", upstream(found))
    assert found["final_kv"].abs().max() > torch.finfo(torch.float16).max
    compare(found, truth.results, truth)
    incoming = {"final_kv": torch.full_like(found["final_kv"], 2.0**-25)}
    small = exact("raw", case, "forward", incoming)
    grads = gradients(found, incoming, case)
    for name in ("kv", "decay"):
        assert grads[name].abs().max() > 0
        assert_close(grads[name], small.gradients[name], small.fp32_error, name)


@pytest.mark.parametrize("dtype", HALVES)
def test_values_of_a_million_stay_exact_inside_and_overflow_honestly(dtype: torch.dtype) -> None:
    """FC-N11: numerator and denominator are fp32; an output beyond the range of fp16 is inf, never clamped."""
    case = draw(dtype=torch.float32, without=("kv", "z"))
    with torch.no_grad():
        case["qkv"][:, :, 2].mul_(2e4).clamp_(-6e4, 6e4)
    case = cast(case, dtype, *OF_QKV)
    scaled = leaves({**case, "beta": 40 * case["beta"].detach()})
    found = run("raw", scaled)
    truth = exact("raw", scaled, "forward", upstream(found))
    compare(found, truth.results, truth)
    output = run("output", scaled)["output"]
    expected = run_sequential("output", {name: value.double() for name, value in scaled.items()})["output"]
    beyond = expected.abs() > 1.01 * torch.finfo(dtype).max
    assert beyond.any() == (dtype == torch.float16)
    assert (output[beyond].float() == expected[beyond].sign() * torch.inf).all()
    assert not output.isnan().any()


@pytest.mark.parametrize("precision", ["bf16", "tf32", "ieee", 0, 1, 2, None])
def test_precision_is_a_lower_bound_that_torch_always_meets(precision: str | int | None) -> None:
    case = draw(dtype=torch.float32)
    expected = run("output", case)
    assert_all_close(run("output", case, precision=precision, impl="torch"), expected, 0.0)


def test_fp64_is_computed_in_fp64_with_fp32_gates_too() -> None:
    case = cast(draw(), torch.float32, "beta", "decay", "cos", "sin")
    wide: Case = cast(case, torch.float64, *case)
    found, expected = run("raw", case), run("raw", wide)
    for name, value in expected.items():
        assert_same(found[name], value, name)
