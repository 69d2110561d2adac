"""Values known without running anything, and the stability facts that follow from them."""

import math

import pytest
import torch
from agreement import assert_close, assert_same, assert_zero, error
from frame_gdn_cases import DIRECTIONS, draw, run, run_sequential
from rounding import half_ulp
from torch import Tensor

from gdn_kernels import FrameState, frame_gdn_numerator, frame_gdn_raw
from gdn_kernels.reference.frame_gdn import frame_transitions

TOLERANCE = 1e-12


def clip(q: Tensor, k: Tensor, v: Tensor, beta: float | Tensor = 1.0, decay: float = 1.0) -> tuple[Tensor, ...]:
    """Return qkv, beta and decay of one head from tokens ``[F, S, D]``."""
    frames, spatial = q.shape[:2]
    qkv = torch.stack([x.double() for x in (q, k, v)], 2).flatten(0, 1)[None, :, :, None]
    strength = torch.as_tensor(beta, dtype=torch.float64).expand(1, 1, frames, spatial)
    return qkv, strength, torch.full((1, 1, frames), decay, dtype=torch.float64)


def state(kv: Tensor, z: Tensor) -> FrameState:
    """Return a state of one head from ``[D, D]`` and ``[D]``."""
    return FrameState(kv.double()[None, None], z.double()[None, None])


def unit(*shape: int) -> Tensor:
    """Return random non-negative unit vectors along the last dim."""
    x = torch.rand(*shape, dtype=torch.float64) + 0.1
    return x / x.norm(dim=-1, keepdim=True)


def test_no_writes_read_nothing_exactly() -> None:
    q, k, v = torch.rand(3, 5, 3, 4)
    found = frame_gdn_raw(*clip(q, k, v, beta=0.0), direction="bidirectional")
    assert_zero(found.numerator)
    assert_zero(found.denominator)


def test_no_writes_and_no_decay_read_the_initial_state_in_every_frame() -> None:
    q, k, v = torch.rand(3, 5, 3, 4)
    start = state(torch.randn(4, 4), torch.rand(4))
    found = frame_gdn_raw(*clip(q, k, v, beta=0.0), initial_state=start, output_final_state=True)
    assert_close(found.numerator[0, :, 0], q.double().flatten(0, 1) @ start.kv[0, 0], TOLERANCE)
    assert_close(found.denominator[0, 0], q.double().flatten(0, 1) @ start.z[0, 0], TOLERANCE)
    for here, there in zip(found.final_state, start, strict=True):
        assert_same(here, there)


def test_no_memory_reads_the_own_frame_forward_and_the_next_one_in_reverse() -> None:
    q, k, v = torch.rand(3, 5, 3, 4).double()
    beta = torch.rand(5, 3, dtype=torch.float64)
    own = q @ (k.mT @ (beta[..., None] * v))
    following = q[:-1] @ (k.mT @ (beta[..., None] * v))[1:]
    arguments = clip(q, k, v, beta, decay=0.0)
    forward, reverse = (frame_gdn_raw(*arguments, direction=d).numerator[0, :, 0] for d in ("forward", "reverse"))
    assert_close(forward, own.flatten(0, 1), TOLERANCE)
    assert_close(reverse[:12], following.flatten(0, 1), TOLERANCE)
    assert_zero(reverse[12:], "the last frame")


def test_one_frame_has_no_reverse_part() -> None:
    """FC-S08: one image."""
    arguments = clip(*torch.rand(3, 1, 3, 4))
    for value in frame_gdn_raw(*arguments, direction="reverse")[:2]:
        assert_zero(value)
    forward, both = (frame_gdn_raw(*arguments, direction=d) for d in ("forward", "bidirectional"))
    assert_same(both.numerator, forward.numerator)
    assert_same(both.denominator, forward.denominator)


def test_a_unit_key_of_one_token_or_of_a_whole_frame_is_read_back() -> None:
    """Numerator v and denominator 1 whatever came before; with one key for all tokens and sum beta = 1, sum beta v."""
    before = state(torch.randn(4, 4), torch.rand(4))
    k, v = unit(1, 1, 4), torch.randn(1, 1, 4).double()
    found = frame_gdn_raw(*clip(k, k, v, decay=0.7), initial_state=before)
    assert_close(found.numerator.flatten(), v.flatten(), TOLERANCE)
    assert_close(found.denominator.flatten(), torch.ones(1), TOLERANCE)
    beta, v = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.randn(1, 3, 4).double()
    found = frame_gdn_raw(*clip(k.expand(1, 3, 4), k.expand(1, 3, 4), v, beta, decay=0.7), initial_state=before)
    assert_close(found.numerator[0, :, 0], (beta @ v[0]).expand(3, 4), TOLERANCE)
    assert_close(found.denominator.flatten(), torch.ones(3), TOLERANCE)


def test_zero_keys_only_decay_the_state() -> None:
    start = state(torch.randn(4, 4), torch.rand(4))
    q, k, v = torch.rand(3, 1, 3, 4)
    found = frame_gdn_raw(*clip(q, 0 * k, v, decay=0.25), initial_state=start, output_final_state=True)
    assert_same(found.final_state.kv, 0.25 * start.kv)
    assert_same(found.final_state.z, 0.25 * start.z)


def test_a_written_outer_product_is_key_by_value() -> None:
    """FC-S14: kv[..., i, j] belongs to key channel i and value channel j, written and read."""
    k, v = torch.tensor([[[2.0, 0.0, 0.0]]]), torch.tensor([[[0.0, 5.0, 7.0]]])
    found = frame_gdn_raw(*clip(k, k, v), output_final_state=True)
    assert found.final_state.kv[0, 0].tolist() == [[0, 10, 14], [0, 0, 0], [0, 0, 0]]
    assert found.final_state.z[0, 0].tolist() == [2, 0, 0]
    start = state(torch.tensor([[0.0, 3, 0], [0, 0, 0], [0, 0, 0]]), torch.zeros(3))
    found = frame_gdn_raw(*clip(k, 0 * k, v), initial_state=start)
    assert found.numerator.flatten().tolist() == [0, 6, 0]


def test_forget_then_correct_with_one_key_twice() -> None:
    """FC-N13: the error is taken against the decayed state, by hand: 3 -> 1.5 -> 1.5 + beta (v - 1.5)."""
    one = torch.ones(1, 1, 1)
    for beta, expected in ((1.0, 8.0), (0.5, 4.75), (2.0, 14.5)):
        found = frame_gdn_numerator(
            *(x.double()[None] for x in (one, one, 8 * one)), torch.full((1, 1, 1, 1), beta).double(),
            torch.full((1, 1, 1), 0.5).double(), initial_state=torch.full((1, 1, 1, 1), 3.0).double(),
        )  # fmt: skip
        assert found.numerator.item() == expected


def test_beta_two_with_a_unit_key_reflects() -> None:
    """FC-N13: the norm of kv is kept, one direction changes sign, and twice is the identity."""
    kv, k = torch.randn(4, 4).double(), unit(1, 1, 4)
    arguments, start = clip(k, k, torch.zeros(1, 1, 4), beta=2.0), state(kv, torch.rand(4))
    once = frame_gdn_raw(*arguments, initial_state=start, output_final_state=True).final_state
    assert_close(once.kv.norm(), kv.norm(), TOLERANCE)
    assert_close(k[0] @ once.kv[0, 0], -k[0] @ kv, TOLERANCE)
    twice = frame_gdn_raw(*arguments, initial_state=once._replace(z=start.z), output_final_state=True).final_state
    assert_close(twice.kv[0, 0], kv, TOLERANCE)


def test_a_contractive_write_may_turn_the_denominator_negative() -> None:
    """Keys (0.3, 0) drive z to (10/3, 0); one key (0.7, 0.7) of lambda 0.98 then gives (12/5, -14/15). No clamp."""
    for frames, z, denominator in ((400, [12 / 5, -14 / 15], -14 / 15), (6, None, -0.00581)):
        k = torch.tensor([[0.3, 0.0]] * frames + [[0.7, 0.7]], dtype=torch.float64)[:, None]
        q = torch.tensor([0.0, 1.0], dtype=torch.float64).expand_as(k)
        found = frame_gdn_raw(*clip(q, k, torch.ones_like(k)), output_final_state=True)
        assert abs(float(found.denominator[0, 0, -1]) - denominator) < 5e-6
        assert z is None or error(found.final_state.z[0, 0], torch.tensor(z, dtype=torch.float64)) < TOLERANCE


def test_a_zero_denominator_divides_by_eps() -> None:
    """z = (2, 0) and a key (1/2, 1/2) give z = (2, 0) in exact binary arithmetic: reading (0, 1) is num / eps."""
    q, k = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[0.5, 0.5]]])
    qkv, beta, decay = clip(q, k, torch.tensor([[[3.0, 1.0]]]))
    found = frame_gdn_raw(qkv, beta, decay, initial_state=state(torch.zeros(2, 2), torch.tensor([2.0, 0.0])))
    assert found.denominator.item() == 0.0
    case = {"qkv": qkv, "beta": beta, "decay": decay, "kv": torch.zeros(1, 1, 2, 2).double()}
    case["z"] = torch.tensor([[[2.0, 0.0]]]).double()
    assert_same(run("output", case, k_scale=1.0, eps=1e-6)["output"], found.numerator / 1e-6)


def test_gates_at_initialisation_halve_the_state_in_103_frames() -> None:
    gate = 1 / (1 + math.exp(-5))
    k = torch.zeros(104, 1, 2)
    start = state(torch.eye(2), torch.ones(2))
    found = frame_gdn_raw(*clip(k + 1, k, k, beta=gate, decay=gate), initial_state=start).denominator[0, 0] / 2
    assert found[101] > 0.5 > found[103]


def transitions_at(k_scale: float, beta: Tensor, weight: float = 1.0) -> Tensor:
    """Return p_kv of random normalised keys, D = 112 and S = 880, one head of one frame."""
    x = torch.randn(1, 1, 1, 880, 112)
    k = k_scale * weight * torch.relu(x / x.square().mean(-1, keepdim=True).sqrt())
    return frame_transitions(None, k, torch.zeros_like(k), beta).p_kv[0, 0, 0].double()


def test_the_usual_key_scale_contracts_and_larger_ones_do_not() -> None:
    """tr P = mean(beta) / 2 at (D S)^-1/2, lambda_max 0.163; about S / 2 at D^-1/2, and S D / 2 at 1."""
    beta = torch.full((1, 1, 1, 880), 0.993307)
    p = transitions_at((112 * 880) ** -0.5, beta)
    assert abs(float(p.trace()) / (0.993307 / 2) - 1) < 0.03
    assert abs(float(torch.linalg.eigvalsh(p)[-1]) - 0.163) < 0.01
    for k_scale, trace in ((112**-0.5, 880 / 2), (1.0, 880 * 112 / 2)):
        p = transitions_at(k_scale, beta)
        assert abs(float(p.trace()) / trace - 1) < 0.03
        assert float(torch.linalg.eigvalsh(p)[-1]) > 2


def test_p_keeps_its_diagonal_in_bf16_and_one_minus_p_does_not() -> None:
    """It averages mean(beta) / (2 D), while numbers just below 1 are 2^-8 apart."""
    p = transitions_at((112 * 880) ** -0.5, torch.full((1, 1, 1, 880), 0.5))
    diagonal, identity = p.diagonal(), torch.eye(112, dtype=torch.float64)
    assert abs(float(diagonal.mean()) / (0.5 / 224) - 1) < 0.03
    stored = p.bfloat16().double().diagonal()
    complement = (identity - (identity - p).bfloat16().double()).diagonal()
    assert ((stored - diagonal).abs() / diagonal).max() <= half_ulp(torch.bfloat16)
    assert ((complement - diagonal).abs() / diagonal).mean() > 0.25


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("margin", [-1e-3, 1e-3])
def test_a_step_expands_exactly_when_lambda_exceeds_one_plus_one_over_decay(decay: float, margin: float) -> None:
    energy = 1 + 1 / decay + margin
    k = math.sqrt(energy) * unit(1, 1, 4)
    start = state(k[0].mT @ torch.randn(1, 4).double(), torch.rand(4))
    found = frame_gdn_raw(*clip(k, k, 0 * k, decay=decay), initial_state=start, output_final_state=True)
    growth = float(found.final_state.kv.norm() / start.kv.norm())
    assert abs(growth - decay * (energy - 1)) < TOLERANCE
    assert (growth > 1) == (margin > 0)


def one_head_takes_all(heads: int, width: int, frames: int) -> dict[str, Tensor]:
    """Return a case whose tokens have all the energy of q and k in the first channel of the first head."""
    spatial = 4
    qkv = torch.zeros(1, frames * spatial, 3, heads, width, dtype=torch.float64)
    qkv[:, :, :2, 0, 0] = torch.rand(1, frames * spatial, 2, dtype=torch.float64) + 1e-2
    qkv[:, :, 2] = torch.randn(1, frames * spatial, heads, width, dtype=torch.float64)
    weights = {f"{name}_norm_weight": torch.ones(heads * width, dtype=torch.float64) for name in "qk"}
    gates = {"beta": torch.ones(1, heads, frames, spatial), "decay": torch.ones(1, heads, frames)}
    return {"qkv": qkv, **{name: gate.double() for name, gate in gates.items()}, **weights}


def test_energy_spread_over_one_of_twenty_heads_expands_too() -> None:
    """All of it uniform on [0, 1] in the 112 channels of that head: lambda_max is about 15 at the usual key scale."""
    x = torch.rand(1, 1, 1, 880, 112, dtype=torch.float64)
    k = (112 * 880) ** -0.5 * x / (x.square().sum(-1, keepdim=True) / (20 * 112)).sqrt()
    p = frame_transitions(None, k, torch.zeros_like(k), torch.ones(1, 1, 1, 880).double()).p_kv
    assert 14 < float(torch.linalg.eigvalsh(p[0, 0, 0])[-1]) < 16


def test_normalisation_over_all_heads_does_not_bound_one_head() -> None:
    """FC-N04: energy in one channel of one head makes lambda_max = H, and fp32 leaves its range about frame 30.

    The result follows fp64 until then and is inf or NaN afterwards, never a plausible number.
    """
    heads, width, frames = 20, 8, 40
    case = one_head_takes_all(heads, width, frames)
    scale = (width * 4) ** -0.5
    k = scale * torch.full((1, 1, 1, 4, 1), (heads * width) ** 0.5, dtype=torch.float64)
    assert abs(float(frame_transitions(None, k, k, torch.ones(1, 1, 1, 4).double()).p_kv) - heads) < 1e-9
    single = {name: value.float() for name, value in case.items()}
    found = run("raw", single, k_scale=scale)["numerator"][0, :, 0, 0].double()
    expected = run_sequential("raw", case, k_scale=scale)["numerator"][0, :, 0, 0]
    assert expected.isfinite().all()
    inside = expected.abs() < torch.finfo(torch.float32).max / 1e3
    alive = int((~inside).nonzero()[0]) // 4
    assert 25 < alive < 35
    for f in range(alive):  # each step multiplies by 1 - lambda, known in fp32 to a few units in the last place
        frame = slice(4 * f, 4 * f + 4)
        assert_close(found[frame], expected[frame], 16 * (f + 1) * half_ulp(torch.float32), f"frame {f}")
    assert not found[4 * (alive + 3) :].isfinite().any()


@pytest.mark.parametrize("keys", ["normal", "equal", "weight-10"])
def test_unscaled_keys_give_the_exact_result_or_an_honest_overflow(keys: str) -> None:
    """FC-N04: fp32 against fp64 with keys that expand; never finite garbage."""
    case = draw((1, 2, 12, 9, 6), without=("kv", "z"))
    with torch.no_grad():
        if keys == "equal":
            case["qkv"][:, :, 1] = 1.0
        if keys == "weight-10":
            case["k_norm_weight"].fill_(10.0)
    for direction in DIRECTIONS:
        single = {name: value.detach().float() for name, value in case.items()}
        truth = {name: value.detach().double() for name, value in single.items()}
        found = run("raw", single, direction, k_scale=1.0)["numerator"]
        loop = run_sequential("raw", single, direction, k_scale=1.0)["numerator"]
        expected = run_sequential("raw", truth, direction, k_scale=1.0)["numerator"]
        frames = [x.detach().unflatten(1, (12, 9)).movedim(1, 0) for x in (found, loop, expected)]
        for f, (ours, theirs, exact) in enumerate(zip(*frames)):
            if theirs.isfinite().all():
                assert_close(ours, exact, 4 * max(error(theirs, exact), 2**-20), f"frame {f} {direction}")
            else:
                assert not ours.isfinite().all() or error(ours, exact) < 1e-2
