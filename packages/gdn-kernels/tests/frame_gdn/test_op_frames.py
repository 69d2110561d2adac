"""What a frame may see and what reaches it: cuts, chunks, masks, directions, and identities of the gradients."""

from itertools import pairwise

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same, assert_zero
from frame_gdn_cases import (
    DIRECTIONS,
    KINDS,
    NO_GRADIENT,
    STARTS,
    Case,
    F,
    S,
    draw,
    gradients,
    leaves,
    run,
    run_sequential,
    upstream,
)
from rounding import exact
from torch import Tensor

TOLERANCE = 1e-12
NO_NORM = ("q_norm_weight", "k_norm_weight")
NO_STATE = ("kv", "z")


def take(case: Case, frames: list[int] | range) -> Case:
    """Return the case of some frames only, sharing the other tensors; differentiable."""
    spatial = case["beta"].shape[3]
    n = [f * spatial + s for f in frames for s in range(spatial)]
    index = list(frames)
    part = {"qkv": case["qkv"][:, n], "beta": case["beta"][:, :, index], "decay": case["decay"][:, :, index]}
    return {**case, **part, **{name: case[name][n] for name in NO_GRADIENT if name in case}}


def in_pieces(kind: str, case: Case, cuts: tuple[int, ...]) -> dict[str, Tensor]:
    """Run a clip call by call, each from the state where the last one ended."""
    parts, state = [], {name: case[name] for name in ("kv", "z") if name in case}
    for a, b in pairwise((0, *cuts, case["decay"].shape[2])):
        found = run(kind, {**take(case, range(a, b)), **state})
        state = {name: found[f"final_{name}"] for name in ("kv", "z") if f"final_{name}" in found}
        parts.append(found)
    joined = {**parts[-1]}
    for name, dim in (("output", 1), ("numerator", 1), ("denominator", 2)):
        if name in joined:
            joined[name] = torch.cat([part[name] for part in parts], dim)
    return joined


@pytest.mark.parametrize("cuts", [(2,), (1, 4), (1, 2, 3, 4), (0, 0, 3, 3, 5)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cut_anywhere_into_calls_equals_one_call(kind: str, cuts: tuple[int, ...]) -> None:
    """One to F calls and empty ones; outputs, final state, and the gradients of everything, initial state included."""
    without = (*NO_NORM, "z", "cos", "sin") if kind == "numerator" else ()
    case = draw(without=without)
    case["qkv"] = (0.4 * case["qkv"].detach()).requires_grad_()
    copy = leaves(case)
    found, expected = in_pieces(kind, case, cuts), run(kind, copy)
    assert_all_close(found, expected, TOLERANCE)
    incoming = upstream(expected)
    assert_all_close(gradients(found, incoming, case), gradients(expected, incoming, copy), TOLERANCE)


@pytest.mark.parametrize("cut", range(12))
def test_every_cut_of_eleven_frames(cut: int) -> None:
    """FC-S09."""
    case = draw((1, 2, 11, 3, 4))
    assert_all_close(in_pieces("output", case, (cut,)), run("output", case), TOLERANCE)


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 31, 32, 33, 63, 64])
def test_cuts_of_sixty_five_frames_around_multiples_of_sixteen(cut: int) -> None:
    """FC-S09."""
    case = draw((1, 2, 65, 1, 4))
    assert_all_close(in_pieces("output", case, (cut,)), run("output", case), TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_one_chunk_is_bidirectional_and_chunks_of_one_frame_are_causal(kind: str) -> None:
    case = draw()
    both, causal = (run(kind, case, direction) for direction in ("bidirectional", "forward"))
    one = run(kind, case, "bidirectional", chunk_starts=(0,))
    single = run(kind, case, "bidirectional", chunk_starts=tuple(range(F)))
    for name, value in both.items():
        assert_same(one[name], value, name)
        assert_same(single[name], causal[name], name)


@pytest.mark.parametrize("starts", [(2,), (1, 3), (1, 2, 4)])
def test_chunks_add_the_reverse_scans_of_each_chunk_to_one_forward_scan(starts: tuple[int, ...]) -> None:
    case = draw()
    found, total = run("raw", case, "bidirectional", chunk_starts=starts), run("raw", case, "forward")
    chunks = [run("raw", take(case, range(a, b)), "reverse") for a, b in pairwise((0, *starts, F))]
    total["numerator"] = total["numerator"] + torch.cat([chunk["numerator"] for chunk in chunks], 1)
    total["denominator"] = total["denominator"] + torch.cat([chunk["denominator"] for chunk in chunks], 2)
    assert_all_close(found, total, TOLERANCE)


def test_both_directions_are_the_sum_of_their_numerators_and_denominators() -> None:
    case = draw()
    forward, reverse, both = (run("raw", case, direction) for direction in DIRECTIONS)
    for name in ("numerator", "denominator"):
        assert_close(both[name], forward[name] + reverse[name], TOLERANCE)


def test_reverse_is_the_forward_scan_of_the_flipped_clip_with_writes_one_frame_late() -> None:
    case = draw(without=(*NO_STATE, "cos", "sin"))
    late = take(case, range(F - 1, -1, -1))
    qkv = late["qkv"].detach().clone()
    qkv[:, :, 1:] = torch.cat((torch.zeros_like(qkv[:, :S, 1:]), qkv[:, :-S, 1:]), 1)
    beta = torch.cat((torch.zeros_like(late["beta"][:, :, :1]), late["beta"][:, :, :-1]), 2)
    decay = torch.cat((torch.ones_like(late["decay"][:, :, :1]), late["decay"][:, :, :-1]), 2)
    found = run("raw", {**late, "qkv": qkv, "beta": beta, "decay": decay})
    expected = run("raw", case, "reverse")
    numerator = found["numerator"].unflatten(1, (F, S)).flip(1).flatten(1, 2)
    denominator = found["denominator"].unflatten(2, (F, S)).flip(2).flatten(2)
    assert_close(numerator, expected["numerator"], TOLERANCE)
    assert_close(denominator, expected["denominator"], TOLERANCE)


@pytest.mark.parametrize("starts", [None, (3,), (2, 3, 5)])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_invalid_frames_of_junk_are_transparent(kind: str, direction: str, starts: tuple | None) -> None:
    """FC-N12: other outputs and gradients as if they were not there; their own outputs and gradients exactly zero."""
    kept, junk = [1, 2, 4, 5, 7], [0, 3, 6]
    case = draw((2, 3, 8, S, 4), without=NO_STATE if direction == "reverse" else ())
    with torch.no_grad():
        for f in junk:
            case["qkv"][:, f * S : f * S + S] *= 1e6
            case["beta"][:, :, f], case["decay"][:, :, f] = 1e3, -7.0
    mask = torch.tensor([f in kept for f in range(8)]).expand(2, 8)
    short = leaves(take(case, kept))
    local = None if starts is None else tuple(sorted({sum(k < c for k in kept) for c in starts}))
    found = run(kind, case, direction, frame_valid=mask, chunk_starts=starts)
    expected = run(kind, short, direction, chunk_starts=local)
    own = {name: value for name, value in found.items() if not name.startswith("final")}
    n, m = ([f * S + s for f in frames for s in range(S)] for frames in (kept, junk))
    for name, value in own.items():
        dim = 2 if name == "denominator" else 1
        assert_close(value.index_select(dim, torch.tensor(n)), expected[name], TOLERANCE, name)
        assert_zero(value.index_select(dim, torch.tensor(m)), name)
    incoming = upstream(found)
    picked = {name: value if name.startswith("final") else None for name, value in incoming.items()}
    for name in own:
        picked[name] = incoming[name].index_select(2 if name == "denominator" else 1, torch.tensor(n))
    grads, wanted = gradients(found, incoming, case), gradients(expected, picked, short)
    for name, gradient in grads.items():
        if name == "qkv":
            assert_zero(gradient[:, m], "dqkv")
            gradient = gradient[:, n]
        elif name in ("beta", "decay"):
            assert_zero(gradient[:, :, junk], name)
            gradient = gradient[:, :, kept]
        assert (gradient is None) == (wanted[name] is None)
        assert gradient is None or assert_close(gradient, wanted[name], TOLERANCE, name) is None


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("frames", [1, 3, 5])
def test_mask_of_the_first_frames_truncates(frames: int, direction: str) -> None:
    case = draw()
    mask = (torch.arange(F) < frames).expand(2, F)
    found, expected = run("raw", case, direction, frame_valid=mask), run("raw", take(case, range(frames)), direction)
    assert_close(found["numerator"][:, : frames * S], expected["numerator"], TOLERANCE)
    for name in ("final_kv", "final_z"):
        assert direction == "reverse" or assert_close(found[name], expected[name], TOLERANCE) is None


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_fraction_of_validity_takes_that_share(direction: str) -> None:
    """Of the write, of the forgetting, and of what is divided: their ratio keeps all of it but for eps."""
    case = draw()
    share = torch.linspace(0.25, 1.0, F, dtype=torch.float64).expand(case["decay"].shape[0], F)
    v, of_tokens = share[:, None], share.repeat_interleave(S, 1)
    scaled = {**case, "beta": case["beta"] * v[..., None], "decay": case["decay"] * v + 1 - v}
    expected = run("raw", scaled, direction)
    expected["numerator"] = expected["numerator"] * of_tokens[..., None, None]
    expected["denominator"] = expected["denominator"] * of_tokens[:, None]
    assert_all_close(run("raw", case, direction, frame_valid=share), expected, TOLERANCE)
    ratio = expected["numerator"] / (expected["denominator"] + 0.5).mT[..., None]
    assert_close(run("output", case, direction, frame_valid=share, eps=0.5)["output"], ratio, TOLERANCE)


def sees(reader: int, frame: int, direction: str, starts: tuple[int, ...]) -> bool:
    """Tell by definition whether ``reader`` depends on what ``frame`` writes."""
    end = min((start for start in (*starts, F) if start > reader), default=F)
    past, future = direction != "reverse", direction != "forward"
    return (past and frame <= reader) or (future and reader < frame < end)


@pytest.mark.parametrize("starts", [(), STARTS])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_frame_depends_on_the_frames_it_sees_and_on_no_other(direction: str, starts: tuple[int, ...]) -> None:
    """Exactly: other outputs keep every bit. The gate of a frame acts where the frame is written."""
    case = draw(without=NO_NORM)
    plain = run("raw", case, direction, chunk_starts=starts)["numerator"].unflatten(1, (F, S))
    for frame in range(F):
        for name in ("qkv", "beta", "decay"):
            changed = leaves(case)
            with torch.no_grad():
                if name == "qkv":
                    changed[name][:, frame * S : (frame + 1) * S, 1:] *= 1.5
                else:
                    changed[name][:, :, frame] *= 0.5
            found = run("raw", changed, direction, chunk_starts=starts)["numerator"].unflatten(1, (F, S))
            for reader in range(F):
                same = torch.equal(found[:, reader], plain[:, reader])
                stored = name != "decay" or frame > 0 or direction != "reverse"
                last_gate = name == "decay" and direction != "forward" and (frame == F - 1 or frame + 1 in starts)
                if direction == "reverse" and last_gate:
                    assert same, (name, frame, reader)  # nothing is stored yet that this gate could fade
                elif direction == "bidirectional" and last_gate:
                    assert same == (reader < frame), (name, frame, reader)
                else:
                    assert same == (not (sees(reader, frame, direction, starts) and stored)), (name, frame, reader)


def test_frame_zero_is_never_written_in_reverse() -> None:
    """Its k, v, beta and decay have exactly no gradient, and the last frame reads exactly zero."""
    case = draw(without=NO_NORM)
    found = run("raw", case, "reverse")
    grads = gradients(found, upstream(found), case)
    assert_zero(grads["qkv"][:, :S, 1:], "dk, dv")
    assert_zero(grads["beta"][:, :, 0], "dbeta")
    assert_zero(grads["decay"][:, :, 0], "ddecay")
    assert_zero(found["numerator"][:, -S:], "last numerator")
    assert_zero(found["denominator"][:, :, -S:], "last denominator")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_norm_without_eps_has_no_gradient_along_its_input(direction: str) -> None:
    """It removes the scale of a token: the sum of dq q over all channels is zero, and of dk k."""
    case = draw()
    found = run("raw", case, direction, norm_eps=0.0)
    dqkv = gradients(found, upstream(found), case)["qkv"]
    along = (dqkv * case["qkv"]).sum((-2, -1))[:, :, :2]
    assert_close(along / (dqkv * case["qkv"]).abs().sum(), torch.zeros_like(along), TOLERANCE)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_output_without_state_is_linear_in_the_values(direction: str) -> None:
    """Per head, sum of dv v = sum of dout out."""
    case = draw(without=NO_STATE)
    found = run("output", case, direction)
    incoming = upstream(found)
    dout = {"output": incoming["output"]}
    dv = gradients(found, dout, case)["qkv"][:, :, 2]
    values = (dv * case["qkv"][:, :, 2]).sum((0, 1, 3))
    assert_close(values, (dout["output"] * found["output"]).sum((0, 1, 3)), TOLERANCE)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_query_gradient_along_the_query_is_what_eps_leaves(direction: str) -> None:
    """Per token and head, dq q = (dout out) eps / (den + eps), rotated copies included."""
    case, eps = draw(without=NO_NORM), 0.3
    denominator = run("raw", case, direction)["denominator"].mT
    found = run("output", case, direction, eps=eps)
    dout = {"output": upstream(found)["output"]}
    dq = gradients(found, dout, case)["qkv"][:, :, 0]
    expected = (dout["output"] * found["output"]).sum(-1) * eps / (denominator + eps)
    assert_close((dq * case["qkv"][:, :, 0].clamp(min=0)).sum(-1), expected, TOLERANCE)


def test_initial_state_gets_the_transposed_transition_of_the_final_states_gradient() -> None:
    """dM_init = E' dM_final with E the product of all g (I - P), and q gets exactly nothing."""
    case = draw(without=(*NO_NORM, "cos", "sin"))
    found = run("numerator", {name: value for name, value in case.items() if name != "z"})
    incoming = {"final_kv": upstream(found)["final_kv"]}
    k = case["qkv"].detach()[:, :, 1].unflatten(1, (F, S)).movedim(3, 1)
    p = torch.einsum("bhfsi,bhfs,bhfsj->bhfij", k, case["beta"].detach(), k)
    expected = incoming["final_kv"]
    for f in reversed(range(F)):
        factor = case["decay"].detach()[:, :, f, None, None] * (torch.eye(4, dtype=torch.float64) - p[:, :, f])
        expected = factor.mT @ expected
    grads = gradients(found, incoming, case)
    assert_close(grads["kv"], expected, TOLERANCE)
    assert_zero(grads["qkv"][:, :, 0], "dq")


REGIMES = {
    "random": lambda d: d,
    "ones": torch.ones_like,
    "zeros": torch.zeros_like,
    "zeros-and-ones": lambda d: (d > 0.6).to(d.dtype),
    "near-one": lambda d: torch.full_like(d, 1 - 1e-4),
    "strong": lambda d: torch.full_like(d, torch.e**-5),
    "very-strong": lambda d: torch.full_like(d, torch.e**-30),
}


@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_decay_gradients_in_every_regime(direction: str, regime: object) -> None:
    """FC-N03, FC-N08: one direct contraction, never a quotient by the gate; in fp64 and, no worse than a loop, fp32."""
    case = draw(without=NO_STATE if direction == "reverse" else ())
    case = leaves({**case, "decay": regime(case["decay"].detach())})
    copy = leaves(case)
    found, expected = run("raw", case, direction), run_sequential("raw", copy, direction)
    incoming = upstream(expected)
    assert_all_close(gradients(found, incoming, case), gradients(expected, incoming, copy), TOLERANCE)
    single = leaves({name: value.float() for name, value in case.items()})
    incoming = {name: value.float() for name, value in incoming.items()}
    truth = exact("raw", single, direction, incoming)
    assert_all_close(gradients(run("raw", single, direction), incoming, single), truth.gradients, truth.fp32_error)


def test_decay_gradient_is_exactly_zero_where_no_state_comes_in() -> None:
    """FC-N08: the first frame forward, the last in reverse."""
    case = draw(without=NO_STATE)
    for direction, frame in (("forward", 0), ("reverse", F - 1)):
        found = run("raw", case, direction)
        assert_zero(gradients(found, upstream(found), case)["decay"][:, :, frame], direction)


@pytest.mark.parametrize("a_log", [-3.0, 0.0, 5.0, 20.0])
def test_gradients_of_the_gates_own_parameters_stay_finite_and_right_at_saturation(a_log: float) -> None:
    """FC-N08: decay = exp(-exp(A_log) softplus(x)), compared in parameter space; A_log = 20 forgets everything."""
    grads = []
    for runner in (run, run_sequential):
        case = draw(without=("decay",))
        x = torch.linspace(-3, 3, 30, dtype=torch.float64).view(2, 3, 5).requires_grad_()
        a = torch.full((3, 1), a_log, dtype=torch.float64, requires_grad=True)
        b = torch.linspace(-40, 40, 210, dtype=torch.float64).view(2, 3, 5, 7).requires_grad_()
        decay = torch.exp(-a.exp() * torch.nn.functional.softplus(x))
        results = runner("raw", {**case, "decay": decay, "beta": b.sigmoid()}, "bidirectional")
        grads.append(gradients(results, upstream(results), {"x": x, "a": a, "b": b}))
    assert all(value.isfinite().all() for value in grads[0].values())
    assert_all_close(*grads, TOLERANCE)
