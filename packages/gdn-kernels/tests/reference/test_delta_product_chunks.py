"""Chunk form of the gated delta product, its backward by hand and its summaries, against the plain recurrence."""

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same
from delta_product_cases import Case, dense_delta_product, gradients, make_case, upstream
from torch import Tensor

from gdn_kernels.reference import delta_product_chunks as chunks
from gdn_kernels.reference.delta_product import delta_product_reference
from gdn_kernels.reference.delta_product_grid import ChunkGrid, chunk_grid
from gdn_kernels.reference.delta_product_operands import (
    ChunkOperands,
    gradients_to_streams,
    operands_on_grid,
    output_gradient_on_grid,
    output_to_stream,
)

TOLERANCE = 1e-12
SCALE = 0.7


def on_grid(case: Case, chunk_tokens: int) -> tuple[ChunkGrid, ChunkOperands]:
    """Lay the case out, detached, and solve the triangular systems."""
    batch, tokens = case.q.shape[:2]
    bounds = [tokens * i for i in range(batch + 1)] if case.bounds is None else case.bounds
    grid = chunk_grid([b - a for a, b in zip(bounds, bounds[1:], strict=False)], chunk_tokens)
    tensors = (None if x is None else x.detach() for x in (case.q, case.k, case.v, case.beta, case.g))
    return grid, operands_on_grid(*tensors, grid, case.steps)


def run_chunked(case: Case, chunk_tokens: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return output and final state, and the gradients for the upstream of `gradients`, all in the public layouts."""
    grid, x = on_grid(case, chunk_tokens)
    entry = None if case.initial_state is None else case.initial_state.detach()
    raw, states = chunks.chunk_forward(x.q, x.k, x.decay, x.factors, grid.plan, entry, scale=SCALE)
    results = {"output": output_to_stream(raw, grid, case.q, case.v), "final_state": states.final_state}
    doutput, dfinal = upstream(results)
    found = chunks.chunk_backward(*x, states, output_gradient_on_grid(doutput, grid, x), dfinal, grid.plan, scale=SCALE)
    named = zip(
        ("q", "k", "v", "beta", "g"),
        gradients_to_streams(found, grid, case.q, case.k, case.v, case.beta, case.g),
        strict=True,
    )
    given = {name: value for name, value in named if name != "g" or case.g is not None}
    if case.initial_state is not None:
        given["state"] = found.dinitial_state
    return results, given


def run_recurrence(case: Case) -> dict[str, Tensor]:
    """Return output and final state of the recurrence."""
    result = delta_product_reference(
        case.q, case.k, case.v, case.beta, case.g, num_householder=case.steps, scale=SCALE,
        initial_state=case.initial_state, output_final_state=True, cu_seqlens=case.bounds,
    )  # fmt: skip
    assert result.final_state is not None
    return {"output": result.output, "final_state": result.final_state}


@pytest.mark.parametrize("chunk_tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("bounds", [None, (0, 0, 7, 7, 12, 13, 31), (0, 17, 17)])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_values_and_every_gradient_agree_with_the_recurrence(
    steps: int, gated: bool, group: int, bounds: tuple[int, ...] | None, chunk_tokens: int
) -> None:
    case = make_case(steps, gated=gated, group=group, bounds=bounds, tokens=19, state=chunk_tokens != 16)
    results, found = run_chunked(case, chunk_tokens)
    expected = run_recurrence(case)
    assert_all_close(results, expected, TOLERANCE)
    assert_all_close(found, gradients(expected, case), TOLERANCE)


def test_chunk_form_agrees_with_dense_transitions() -> None:
    """Directly, so that the oracle of the test above is not the package's own."""
    case = make_case(2, group=2, bounds=(0, 4, 4, 11))
    output, final_state = dense_delta_product(case, SCALE)
    found, _ = run_chunked(case, 4)
    assert_all_close(found, {"output": output, "final_state": final_state}, TOLERANCE)


@pytest.mark.parametrize("bounds", [(0, 0), (0, 0, 0)])
def test_empty_fragments_hand_state_and_gradient_on(bounds: tuple[int, ...]) -> None:
    case = make_case(2, bounds=bounds)
    results, found = run_chunked(case, 4)
    assert case.initial_state is not None
    assert_same(results["final_state"], case.initial_state)
    assert_all_close(found, gradients(run_recurrence(case), case), TOLERANCE)


@pytest.mark.parametrize("fragments", [None, (0,), (4,), (1,), (3, 0)])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_summaries_are_the_maps_of_state_and_gradient(
    steps: int, gated: bool, fragments: tuple[int, ...] | None
) -> None:
    case = make_case(steps, gated=gated, group=2, bounds=(0, 4, 4, 11, 12, 20))
    grid, x = on_grid(case, 3)
    value_width = case.v.shape[-1]
    chosen = list(range(5)) if fragments is None else list(fragments)
    b, m = (
        chunks.forward_summary(x.k, x.decay, x.factors, grid.plan, fragments)
        .split([value_width, case.q.shape[-1]], dim=-1)
    )  # fmt: skip
    results = run_recurrence(case)
    assert case.initial_state is not None
    entry = case.initial_state.detach()
    assert_close(m @ entry[chosen] + b, results["final_state"][chosen], TOLERANCE)

    doutput = torch.randn_like(results["output"])
    dfinal = torch.randn_like(results["final_state"])
    (expected,) = torch.autograd.grad(list(results.values()), [case.initial_state], [doutput, dfinal])
    upstream = output_gradient_on_grid(doutput, grid, x)
    packed = chunks.backward_summary(x.q, x.k, x.decay, x.factors.w, upstream, grid.plan, fragments, scale=SCALE)
    assert packed.is_contiguous()
    gamma, transposed = packed.split([value_width, case.q.shape[-1]], dim=-1)
    assert_close(transposed, m.mT, TOLERANCE, "M^T")
    assert_close(transposed @ dfinal[chosen] + gamma, expected[chosen], TOLERANCE)


@pytest.mark.parametrize("cuts", [(0, 20), (0, 5, 20), (0, 0, 7, 8, 20, 20)])
def test_summaries_of_pieces_compose_to_that_of_the_whole(cuts: tuple[int, ...]) -> None:
    whole, pieces = make_case(2, group=2, bounds=(0, 20), state=False), make_case(2, group=2, bounds=cuts, state=False)
    assert_same(whole.q, pieces.q)
    maps = []
    for case in (whole, pieces):
        grid, x = on_grid(case, 4)
        maps.append(chunks.forward_summary(x.k, x.decay, x.factors, grid.plan))
    value_width, width = whole.v.shape[-1], whole.q.shape[-1]
    b, m = maps[0].new_zeros(4, width, value_width), torch.eye(width, dtype=torch.float64).expand(4, -1, -1)
    for piece in maps[1]:
        increment, transition = piece.split([value_width, width], dim=-1)
        b, m = transition @ b + increment, transition @ m
    assert_close(torch.cat((b, m), dim=-1), maps[0][0], TOLERANCE)


def test_transitions_contract_with_unit_keys_and_strengths_up_to_two() -> None:
    grid, x = on_grid(make_case(3, tokens=40), 8)
    summary = chunks.forward_summary(x.k, x.decay, x.factors, grid.plan)
    norms = torch.linalg.matrix_norm(summary[..., x.v.shape[-1] :], ord=2)
    assert float(norms.max()) <= 1 + TOLERANCE


def test_decays_are_exact_next_to_a_very_strong_one() -> None:
    """A difference of cumulative sums would lose the small gates after g = -1e5 in fp32."""
    g = torch.tensor([-0.25, -1e5, -0.125, -0.5]).reshape(1, 1, 1, 4)
    decay = chunks.chunk_decay(g, 4, g)
    assert decay.exit is not None
    assert_close(decay.exit.flatten(), torch.tensor([0.0, -0.625, -0.5, 0.0]).exp() * (torch.arange(4) > 0), 1e-7)
    assert_same(decay.between.triu(1), torch.zeros_like(decay.between))


def test_arguments_are_left_alone() -> None:
    case = make_case(2, group=2)
    grid, x = on_grid(case, 3)
    given = [x.q, x.k, x.v, x.beta, *x.decay, *x.factors]
    before = [y.clone() for y in given]
    _, states = chunks.chunk_forward(x.q, x.k, x.decay, x.factors, grid.plan, scale=SCALE)
    doutput = torch.randn(*states.v_new.shape[:3], 3, 3, dtype=torch.float64)
    kept = [y.clone() for y in (*states, doutput)]
    chunks.chunk_backward(x.q, x.k, x.v, x.beta, x.decay, x.factors, states, doutput, None, grid.plan, scale=SCALE)
    for found, expected in zip((*given, *states, doutput), (*before, *kept), strict=True):
        assert_same(found, expected)
