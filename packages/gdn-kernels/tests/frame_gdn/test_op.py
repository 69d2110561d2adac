"""The public operations against the token-by-token loop: values, states and every gradient, in fp64."""

from itertools import combinations

import pytest
import torch
from agreement import assert_all_close, assert_same, assert_zero
from frame_gdn_cases import (
    DIRECTIONS,
    KINDS,
    MASK,
    NO_GRADIENT,
    STARTS,
    Case,
    draw,
    gradients,
    leaves,
    run,
    run_sequential,
    upstream,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gdn_kernels import FrameState, frame_gdn

TOLERANCE = 1e-12
MODES = [
    pytest.param({}, id="plain"),
    pytest.param({"chunk_starts": STARTS}, id="chunks"),
    pytest.param({"frame_valid": MASK}, id="mask"),
    pytest.param({"chunk_starts": (1, 2, 4), "frame_valid": MASK}, id="chunks-and-mask"),
]


def case_for(kind: str, direction: str, sizes: tuple[int, int, int, int, int] | None = None, **options: object) -> Case:
    """Draw a case with all that the operation takes."""
    without = ("q_norm_weight", "k_norm_weight", "z", "cos", "sin") if kind == "numerator" else ()
    without += ("kv", "z") if direction == "reverse" else ()
    case = draw(*([sizes] if sizes else []), without=without, **options)
    return leaves({**case, "qkv": 0.4 * case["qkv"]}) if kind == "numerator" else case


def check(kind: str, case: Case, direction: str, incoming: dict[str, Tensor] | None = None, **options: object) -> None:
    """Compare results and the gradient of every leaf with the loop's."""
    copy = leaves(case)
    found, expected = run(kind, case, direction, **options), run_sequential(kind, copy, direction, **options)
    assert_all_close(found, expected, TOLERANCE)
    incoming = upstream(expected) if incoming is None else incoming
    assert_all_close(gradients(found, incoming, case), gradients(expected, incoming, copy), TOLERANCE)


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_op_agrees_with_the_sequential_loop(kind: str, direction: str, options: dict) -> None:
    """FC-S15: all of B, H, F, S and D differ, so that swapped axes cannot pass."""
    check(kind, case_for(kind, direction), direction, **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sizes", [(1, 3, 2, 5, 7), (3, 1, 7, 2, 9), (2, 5, 3, 1, 6), (1, 2, 1, 3, 4)])
def test_op_agrees_at_other_sizes(sizes: tuple[int, int, int, int, int], direction: str) -> None:
    """FC-S13: one head, odd widths, 9 channels in all. One token a frame, one frame."""
    check("raw", case_for("raw", direction, sizes), direction)


@pytest.mark.parametrize("scalars", [{"eps": 0.3}, {"norm_eps": 0.7}, {"norm_eps": 0.0}, {"k_scale": 0.05}])
def test_op_agrees_for_other_scalars(scalars: dict) -> None:
    check("output", case_for("output", "bidirectional"), "bidirectional", **scalars)


GIVEN = ("q_norm_weight", "k_norm_weight", "state", "rope")


@pytest.mark.parametrize("absent", [c for n in range(1, 5) for c in combinations(GIVEN, n)], ids="-".join)
def test_op_agrees_whichever_optional_arguments_are_left_out(absent: tuple[str, ...]) -> None:
    """FC-A05: every subset of the optional arguments."""
    parts = {"state": ("kv", "z"), "rope": NO_GRADIENT}
    case = draw(without=tuple(part for name in absent for part in parts.get(name, (name,))))
    check("raw", case, "bidirectional", chunk_starts=STARTS)


@pytest.mark.parametrize("name", ["q_norm_weight", "k_norm_weight"])
def test_one_norm_weight_left_out_is_ones_in_its_place(name: str) -> None:
    case = draw()
    ones = {**case, name: torch.ones_like(case[name])}
    lacking = {key: value for key, value in case.items() if key != name}
    assert_all_close(run("output", lacking), run("output", ones), 0.0)


def test_optional_arguments_mean_their_neutral_values() -> None:
    """FC-A05: zeros as state, every frame valid, chunk start 0 and no rotation are what None means."""
    case = draw(without=("kv", "z", "cos", "sin"))
    heads, width = case["qkv"].shape[-2:]
    zero = FrameState(case["qkv"].new_zeros(2, heads, width, width), case["qkv"].new_zeros(2, heads, width))
    still = {"cos": torch.ones(35, 2), "sin": torch.zeros(35, 2)}
    plain = run("raw", case, "bidirectional")
    valid = torch.ones_like(MASK)
    given = run("raw", {**case, **still, **zero._asdict()}, "bidirectional", chunk_starts=(0,), frame_valid=valid)
    for name, value in plain.items():
        assert_same(given[name], value, name)


def test_norm_weights_and_masks_may_come_in_either_form() -> None:
    case = draw()
    folded = {**case, **{name: case[name].view(3, 4) for name in ("q_norm_weight", "k_norm_weight")}}
    expected = run("output", case, frame_valid=MASK)
    assert_all_close(run("output", folded, frame_valid=MASK.float()), expected, 0.0)


def strided(x: Tensor) -> Tensor:
    """The same values, every second entry of a wider buffer full of NaN, dims in reverse order."""
    order = tuple(reversed(range(x.ndim)))
    wide = torch.full((*x.permute(order).shape, 2), torch.nan, dtype=x.dtype)
    wide[..., 0] = x.permute(order)
    return wide[..., 0].permute(order)


@pytest.mark.parametrize("form", ["strided", "expanded"])
@pytest.mark.parametrize("kind", KINDS)
def test_op_takes_incoming_gradients_of_any_stride(kind: str, form: str) -> None:
    """FC-A01: of the result and of the final state."""
    case = case_for(kind, "bidirectional")
    incoming = upstream(run(kind, case, "bidirectional"))
    if form == "strided":
        incoming = {name: strided(value) for name, value in incoming.items()}
        assert all(not value.is_contiguous() for value in incoming.values())
    else:
        incoming = {name: value.flatten()[:1].squeeze().expand(value.shape) for name, value in incoming.items()}
    check(kind, case, "bidirectional", incoming)


CONSUMERS = {
    "sum": lambda y: y.sum(),
    "mean": lambda y: y.mean(),
    "expand": lambda y: (y.expand(3, *y.shape) * torch.arange(3.0, dtype=y.dtype).view(3, *[1] * y.ndim)).sum(),
    "cat-split-transpose": lambda y: torch.cat((y, 2 * y), 1).transpose(0, -1).split(2)[0].square().sum(),
}


@pytest.mark.parametrize("consumer", CONSUMERS.values(), ids=CONSUMERS)
def test_op_feeds_consumers_of_every_kind(consumer: object) -> None:
    """FC-A01: what sum, mean, expand, cat, transpose and split send back, to outputs and final states."""
    case = draw()
    copy = leaves(case)
    found, expected = run("raw", case), run_sequential("raw", copy)
    ones = {name: torch.ones((), dtype=torch.float64) for name in found}
    found, expected = ({name: consumer(y) for name, y in results.items()} for results in (found, expected))
    assert_all_close(gradients(found, ones, case), gradients(expected, ones, copy), TOLERANCE)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", ["output", "raw"])
def test_op_gradients_with_no_incoming_gradient_for_some_results(kind: str, count: int) -> None:
    """FC-A05: every subset of the results in the loss; a leaf that none of them reaches gets None or zeros."""
    case = draw()
    copy = leaves(case)
    found, expected = run(kind, case), run_sequential(kind, copy)
    incoming = upstream(expected)
    for used in combinations(found, min(count, len(found))):
        part = {name: incoming[name] for name in used}
        pairs = zip(gradients(found, part, case, keep=True).items(), gradients(expected, part, copy, keep=True).items())
        for (name, value), (_, wanted) in pairs:
            zero = torch.zeros_like(case[name])
            assert_all_close(
                {name: zero if value is None else value}, {name: zero if wanted is None else wanted}, TOLERANCE
            )


@pytest.mark.parametrize("with_state", [False, True], ids=["no-state", "state"])
@pytest.mark.parametrize("in_loss", [False, True], ids=["not-in-loss", "in-loss"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("kind", KINDS)
def test_initial_state_given_or_not_and_final_state_in_the_loss_or_not(
    kind: str, direction: str, in_loss: bool, with_state: bool
) -> None:
    """FC-A06: the four cases, per direction."""
    case = case_for(kind, direction)
    if not with_state:
        case = {name: value for name, value in case.items() if name not in ("kv", "z")}
    incoming = upstream(run(kind, case, direction))
    used = {name: value for name, value in incoming.items() if in_loss or not name.startswith("final")}
    check(kind, case, direction, used)


def test_loss_of_the_final_state_alone_reaches_the_initial_state_and_leaves_q_at_zero() -> None:
    """FC-A07: gradients of the state have its shape and dtype; q gets exactly zero."""
    case = draw()
    results = run("output", case)
    final_only = {name: results[name] for name in ("final_kv", "final_z")}
    check("output", case, "forward", upstream(final_only))
    found = gradients(final_only, upstream(final_only), case)
    assert_zero(found["qkv"][:, :, 0], "dq")
    for name in ("kv", "z"):
        assert found[name].shape == case[name].shape
        assert found[name].abs().min() > 0


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str, direction: str) -> None:
    sizes = (1, 2, 3, 2, 4)
    case = case_for(kind, direction, sizes)
    free = [name for name in case if name not in NO_GRADIENT]

    options = {"chunk_starts": (1,), **({"eps": 0.1} if kind == "output" else {})}

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(run(kind, {**case, **dict(zip(free, values, strict=True))}, direction, **options).values())

    assert torch.autograd.gradcheck(function, [case[name] for name in free], fast_mode=False)


def test_gradcheck_of_the_denominator_alone() -> None:
    """FC-A04: the path from the keys to the denominator is part of dk."""
    case = draw((1, 2, 3, 2, 4), without=("cos", "sin"))

    def denominator(qkv: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return run("raw", {**case, "qkv": qkv, "beta": beta, "decay": decay}, "bidirectional")["denominator"]

    leaf = [case[name] for name in ("qkv", "beta", "decay")]
    assert torch.autograd.gradcheck(denominator, leaf)
    dqkv = torch.autograd.grad(denominator(*leaf).sum(), leaf[0])[0]
    assert dqkv[:, :, 1].abs().max() > 1e-3
    assert_zero(dqkv[:, :, 2], "dv")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_cost_in_flops_is_the_documented_one(direction: str) -> None:
    batch, heads, frames, spatial, width = sizes = (2, 3, 5, 7, 4)
    case = draw(sizes, without=("kv", "z"))
    scans = 2 if direction == "bidirectional" else 1
    per_frame = 8 * spatial * width**2 + 2 * spatial * width + scans * (2 * width**3 + 2 * width**2)
    with FlopCounterMode(display=False) as forward:
        results = run("raw", case, direction)
    assert forward.get_total_flops() == batch * heads * frames * per_frame
    with FlopCounterMode(display=False) as backward:
        gradients(results, upstream(results), case)
    assert backward.get_total_flops() <= 2 * forward.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
def test_the_final_state_comes_only_when_asked_for(kind: str) -> None:
    case = case_for(kind, "forward")
    asked, plain = run(kind, case), run(kind, case, output_final_state=False)
    assert {name for name in asked if name not in plain} == {"final_kv"} | (
        {"final_z"} if kind != "numerator" else set()
    )
    for name, value in plain.items():
        assert_same(value, asked[name], name)


def test_options_are_keyword_only() -> None:
    """FC-A05."""
    case = draw()
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        frame_gdn(case["qkv"], case["beta"], case["decay"], None)
