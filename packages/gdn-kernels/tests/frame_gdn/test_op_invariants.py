"""What must hold whatever the numbers are: closed forms, symmetries, dependence. Each test is named after its claim."""

from itertools import permutations

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same, assert_zero
from frame_gdn_cases import DIRECTIONS, EPS, K_SCALE, B, Case, D, F, H, S, draw, gradients, leaves, run, upstream
from sequential_frame_gdn import turn
from torch import Tensor

from gdn_kernels import frame_gdn_numerator

TOLERANCE = 1e-12
NO_NORM = ("q_norm_weight", "k_norm_weight")
NO_STATE = ("kv", "z")
NO_ROPE = ("cos", "sin")


def frames_of(x: Tensor, frames: int = F) -> Tensor:
    """``[B, N, H, ...]`` to ``[B, H, F, S, ...]``."""
    return x.unflatten(1, (frames, x.shape[1] // frames)).movedim(3, 1)


def features(case: Case, frames: int = F) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, rotated q, k, rotated k, v of a case without norm weights, each ``[B, H, F, S, D]``."""
    q, k, v = case["qkv"].detach().unbind(2)
    q, k = q.clamp(min=0), K_SCALE * k.clamp(min=0)
    tables = case.get("cos"), case.get("sin")
    return tuple(frames_of(x, frames) for x in (q, turn(q, *tables), k, turn(k, *tables), v))


def constant(case: Case, **values: float | Tensor) -> Case:
    """Return the case with some entries replaced, scalars filling the shape."""
    filled = {name: torch.as_tensor(x, dtype=case[name].dtype).expand_as(case[name]) for name, x in values.items()}
    return leaves({**case, **filled})


def test_one_frame_of_one_token_outputs_its_value() -> None:
    """out = v n / (n + eps) with n = beta q.k, for any rotation and decay."""
    case = draw((B, H, 1, 1, D), without=NO_NORM + NO_STATE)
    q, _, k, _, v = features(case, 1)
    n = (case["beta"].unsqueeze(-1) * q * k).sum(-1, keepdim=True)
    found = run("output", case)["output"]
    assert_close(frames_of(found, 1), v * n / (n + EPS), TOLERANCE)
    assert_same(run("output", constant(case, decay=0.0))["output"], found)


@pytest.mark.parametrize("options", [{}, {"chunk_starts": (0,)}], ids=["one-chunk", "chunk-starts"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_one_frame_is_linear_attention_and_ignores_its_decay(direction: str, options: dict) -> None:
    case = draw((B, H, 1, S, D), without=NO_NORM + NO_STATE)
    q, qr, k, kr, v = features(case, 1)
    beta = case["beta"][..., None]
    found = run("output", case, direction, **options)
    expected = (qr @ (kr.mT @ (beta * v))) / (q @ (k * beta).sum(-2, keepdim=True).mT + EPS)
    assert_close(frames_of(found["output"], 1), expected, TOLERANCE)
    assert_zero(gradients(found, upstream(found), case)["decay"], "ddecay")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_values_tie_the_two_streams_together(direction: str) -> None:
    """With every value u and no rotation, kv = z u' and out = u den / (den + eps)."""
    case = draw(without=NO_STATE + NO_ROPE)
    u = torch.randn(H, D, dtype=torch.float64)
    qkv = case["qkv"].detach().clone()
    qkv[:, :, 2] = u
    raw, out = (run(kind, {**case, "qkv": qkv}, direction) for kind in ("raw", "output"))
    denominator = raw["denominator"].mT[..., None]
    assert_close(raw["numerator"], u * denominator, TOLERANCE)
    assert_close(out["output"], u * denominator / (denominator + EPS), TOLERANCE)
    if direction != "reverse":
        assert_close(raw["final_kv"], raw["final_z"][..., None] * u[:, None], TOLERANCE)


def test_zero_decay_forward_reads_its_own_frame_only() -> None:
    """The initial state has no influence, and exactly no gradient."""
    case = constant(draw(without=NO_NORM), decay=0.0)
    _, qr, _, kr, v = features(case)
    found = run("raw", case)
    assert_close(frames_of(found["numerator"]), qr @ (kr.mT @ (case["beta"][..., None] * v)), TOLERANCE)
    grads = gradients(found, upstream(found), case)
    assert_zero(grads["kv"], "dkv")
    assert_zero(grads["z"], "dz")


def test_zero_decay_both_ways_reads_its_own_frame_and_the_next() -> None:
    case = constant(draw(without=NO_NORM + NO_STATE), decay=0.0)
    _, qr, _, kr, v = features(case)
    a = kr.mT @ (case["beta"][..., None] * v)
    later = torch.cat((a[:, :, 1:], torch.zeros_like(a[:, :, :1])), 2)
    assert_close(frames_of(run("raw", case, "bidirectional")["numerator"]), qr @ (a + later), TOLERANCE)


def test_without_writes_the_state_only_decays() -> None:
    case = constant(draw(without=NO_NORM), beta=0.0)
    q, qr, *_ = features(case)
    found = run("raw", case)
    fade = case["decay"].cumprod(-1)[..., None, None]
    assert_close(frames_of(found["numerator"]), qr @ (fade * case["kv"][:, :, None]), TOLERANCE)
    assert_close(found["denominator"], (q @ (fade[..., 0] * case["z"][:, :, None])[..., None]).flatten(2), TOLERANCE)
    assert_close(found["final_kv"], fade[:, :, -1] * case["kv"], TOLERANCE)
    still = run("raw", constant(case, decay=1.0))
    assert_same(still["final_kv"], case["kv"])
    assert_same(still["final_z"], case["z"])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_without_writes_and_without_state_the_output_is_zero(direction: str) -> None:
    case = constant(draw(without=NO_STATE), beta=0.0)
    assert_zero(run("output", case, direction)["output"], "output")


def test_a_unit_key_with_beta_one_reads_its_value_whatever_was_stored() -> None:
    case = draw((B, H, 1, 1, D))
    _, k, v = case["qkv"].detach().unbind(2)
    k = k / k.norm(dim=-1, keepdim=True)
    found = frame_gdn_numerator(k, k, v, torch.ones_like(case["beta"]), case["decay"], initial_state=case["kv"])
    assert_close(found.numerator, v, TOLERANCE)


def test_one_channel_with_constant_inputs_is_a_geometric_series() -> None:
    """kv_f = beta k v (1 - r^(f+1)) / (1 - r), r = decay (1 - beta k^2)."""
    k, v, beta, decay = 0.6, 1.7, 0.8, 0.9
    ones = torch.ones(1, 9, 1, 1, dtype=torch.float64)
    gates = beta * torch.ones(1, 1, 9, 1, dtype=torch.float64), decay * torch.ones(1, 1, 9, dtype=torch.float64)
    found = frame_gdn_numerator(ones, k * ones, v * ones, *gates).numerator.flatten()
    r = decay * (1 - beta * k * k)
    assert_close(found, beta * k * v * (1 - r ** torch.arange(1.0, 10.0).double()) / (1 - r), TOLERANCE)


def test_one_key_in_every_frame_saturates_the_denominator() -> None:
    """z after n frames = (1 - (1 - |k|^2)^n) / |k|^2 k."""
    k = torch.tensor([0.3, 0.1, 0.5, 0.2], dtype=torch.float64)
    qkv = k.expand(1, 6, 3, 1, 4)
    case = {"qkv": qkv, "beta": qkv.new_ones(1, 1, 6, 1), "decay": qkv.new_ones(1, 1, 6)}
    energy = float(k @ k)
    assert_close(run("raw", case, k_scale=1.0)["final_z"][0, 0], (1 - (1 - energy) ** 6) / energy * k, TOLERANCE)


def test_orthogonal_keys_equal_token_by_token_steps_in_any_order_and_other_keys_do_not() -> None:
    def by_tokens(k: Tensor, v: Tensor, beta: Tensor, kv: Tensor, order: tuple[int, ...]) -> Tensor:
        for s in order:
            kv = kv + beta[s] * torch.outer(k[s], v[s] - k[s] @ kv)
        return kv

    orthogonal = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0][:3]
    v, kv, beta = torch.randn(3, D).double(), torch.randn(D, D).double(), torch.rand(3).double()
    for k, equal in ((orthogonal, True), (torch.randn(3, D).double(), False)):
        operands = (x[None, :, None] for x in (k, k, v))
        gates = beta[None, None, None], torch.ones(1, 1, 1).double()
        found = frame_gdn_numerator(*operands, *gates, initial_state=kv[None, None], output_final_state=True)
        for order in permutations(range(3)):
            steps = by_tokens(k, v, beta, kv, order)
            if equal:
                assert_close(found.final_state[0, 0], steps, TOLERANCE)
            else:
                assert (found.final_state[0, 0] - steps).abs().max() > 1e-2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_scaling_keys_by_c_and_beta_by_its_inverse_square_leaves_the_ratio(direction: str) -> None:
    """c states, so that eps = 0 leaves the output unchanged; the same for queries scaled by c."""
    case, c = draw(without=NO_STATE + NO_NORM), 0.7
    keys = constant(case, beta=case["beta"].detach() / c**2)
    plain = run("raw", case, direction)
    scaled = run("raw", keys, direction, k_scale=c * K_SCALE)
    for part in ("numerator", "denominator"):
        assert_close(scaled[part] * c, plain[part], TOLERANCE)
    qkv = case["qkv"].detach().clone()
    qkv[:, :, 0] *= c
    queries = run("raw", {**case, "qkv": qkv}, direction)
    for part in ("numerator", "denominator"):
        assert_close(queries[part], c * plain[part], TOLERANCE)


def with_tokens(case: Case, order: Tensor, **replaced: Tensor) -> Case:
    """Return the case with the tokens of every frame taken in ``order``."""
    n = (torch.arange(F)[:, None] * S + order).flatten()
    tokens = {"qkv": case["qkv"][:, n], "beta": case["beta"][..., order], "cos": case["cos"][n], "sin": case["sin"][n]}
    return leaves({**case, **tokens, **replaced})


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tokens_of_a_frame_have_no_order(direction: str) -> None:
    """Permuting them, rotation included, permutes the outputs and leaves the states."""
    case, order = draw(), torch.randperm(S)
    plain, found = run("raw", case, direction), run("raw", with_tokens(case, order), direction)
    n = (torch.arange(F)[:, None] * S + order).flatten()
    expected = {**plain, "numerator": plain["numerator"][:, n], "denominator": plain["denominator"][..., n]}
    assert_all_close(found, expected, TOLERANCE)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_token_twice_with_half_its_beta_is_the_token_once(direction: str) -> None:
    case, order = draw(), torch.arange(S).repeat_interleave(2)
    twice = with_tokens(case, order, beta=case["beta"].detach()[..., order] / 2)
    plain, found = run("raw", case, direction), run("raw", twice, direction)
    expected = {**plain, "numerator": plain["numerator"].repeat_interleave(2, 1)}
    expected["denominator"] = plain["denominator"].repeat_interleave(2, 2)
    assert_all_close(found, expected, TOLERANCE)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tokens_with_beta_zero_add_nothing(direction: str) -> None:
    """FC-N12: random keys, but neither numerator nor denominator of the others changes, and dk = dv = 0 exactly."""
    case, order = draw(), torch.arange(S + 2) % S
    silent = with_tokens(case, order)
    with torch.no_grad():
        silent["beta"][..., S:] = 0.0
        frames_of(silent["qkv"])[..., S:, :, :].normal_()
    plain, found = run("raw", case, direction), run("raw", silent, direction)
    n = torch.arange(F * (S + 2)).view(F, S + 2)
    kept = {**found, "numerator": found["numerator"][:, n[:, :S].flatten()]}
    kept["denominator"] = found["denominator"][..., n[:, :S].flatten()]
    assert_all_close(kept, plain, TOLERANCE)
    dqkv = gradients(found, upstream(found), silent)["qkv"]
    assert_zero(dqkv[:, n[:, S:].flatten(), 1:], "dk and dv of silent tokens")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_orthogonal_matrix_on_queries_and_keys_leaves_the_numerator(direction: str) -> None:
    case = draw()
    q, k, v = (0.4 * case["qkv"].detach()).unbind(2)
    turned = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0]
    plain = frame_gdn_numerator(q, k, v, case["beta"], case["decay"], direction=direction)
    found = frame_gdn_numerator(q @ turned, k @ turned, v, case["beta"], case["decay"], direction=direction)
    assert_close(found.numerator, plain.numerator, TOLERANCE)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_scaling_values_scales_the_numerator_alone(direction: str) -> None:
    case = draw(without=NO_STATE)
    qkv = case["qkv"].detach().clone()
    qkv[:, :, 2] *= 3.0
    plain, found = run("raw", case, direction), run("raw", {**case, "qkv": qkv}, direction)
    assert_close(found["numerator"], 3.0 * plain["numerator"], TOLERANCE)
    assert_same(found["denominator"], plain["denominator"])


def householder_oracle(case: Case) -> Tensor:
    """Return numerators of a Gated Delta Product: one token a frame, one Householder step per eigenvector of P."""
    q, k, v = (frames_of(x) for x in case["qkv"].detach().unbind(2))
    numerators = torch.zeros_like(q)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        kv = case["kv"].detach()[b, h]
        for f in range(F):
            weighed = case["beta"].detach()[b, h, f, :, None] * k[b, h, f]
            eigenvalues, vectors = torch.linalg.eigh(weighed.mT @ k[b, h, f])
            kv = case["decay"].detach()[b, h, f] * kv
            for eigenvalue, e in zip(eigenvalues, vectors.mT):
                if eigenvalue > 1e-13 * eigenvalues[-1]:
                    value = (weighed @ e) @ v[b, h, f] / eigenvalue
                    kv = kv + eigenvalue * torch.outer(e, value - e @ kv)
            numerators[b, h, f] = q[b, h, f] @ kv
    return numerators


@pytest.mark.parametrize("spatial", [2, 7], ids=["rank-deficient", "full-rank"])
def test_a_frame_is_a_product_of_householder_steps_along_the_eigenvectors_of_p(spatial: int) -> None:
    """An oracle with no formula in common. It divides by small eigenvalues, hence 1e-8."""
    case = draw((B, H, F, spatial, D), without=NO_ROPE + NO_NORM)
    case = leaves({**case, "qkv": 0.4 * case["qkv"]})
    found = run("numerator", {name: x for name, x in case.items() if name != "z"})["numerator"]
    assert_close(frames_of(found), householder_oracle(case), 1e-8)


def test_rotation_leaves_the_denominator_alone() -> None:
    """The z stream and its queries are never rotated; the numerator is."""
    case = draw()
    turned = {**case, "cos": case["sin"], "sin": case["cos"]}
    plain, found = run("raw", case, "bidirectional"), run("raw", turned, "bidirectional")
    assert_same(found["denominator"], plain["denominator"])
    assert (found["numerator"] - plain["numerator"]).abs().max() > 1e-2
