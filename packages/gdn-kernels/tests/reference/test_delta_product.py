"""The plain recurrence of the gated delta product against dense transitions, head by head."""

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same
from delta_product_cases import Case, dense_delta_product, gradients, make_case
from torch import Tensor

from gdn_kernels.reference.delta_product import delta_product_reference

TOLERANCE = 1e-12


def run(case: Case, **options: float) -> dict[str, Tensor]:
    """Return output and final state of the reference, by name."""
    result = delta_product_reference(
        case.q, case.k, case.v, case.beta, case.g, num_householder=case.steps, initial_state=case.initial_state,
        output_final_state=True, cu_seqlens=case.bounds, **options,
    )  # fmt: skip
    assert result.final_state is not None
    return {"output": result.output, "final_state": result.final_state}


@pytest.mark.parametrize("bounds", [None, (0, 3, 3, 8), (0, 0, 5)])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_reference_agrees_with_dense_transitions(
    steps: int, gated: bool, group: int, bounds: tuple[int, ...] | None
) -> None:
    case = make_case(steps, gated=gated, group=group, bounds=bounds)
    found, expected = run(case), dict(zip(("output", "final_state"), dense_delta_product(case), strict=True))
    assert_all_close(found, expected, TOLERANCE)
    assert_all_close(gradients(found, case), gradients(expected, case), TOLERANCE)


def test_scale_and_states_have_defaults() -> None:
    case = make_case(state=False)
    assert_close(run(case, scale=0.3)["output"], dense_delta_product(case, 0.3)[0], TOLERANCE)
    plain = delta_product_reference(case.q, case.k, case.v, case.beta, case.g, num_householder=2)
    assert plain.final_state is None
    assert_same(plain.output, run(case)["output"])


def test_one_step_with_a_unit_key_and_full_strength_replaces_what_the_key_held() -> None:
    case = make_case(1, gated=False, tokens=1)
    case = case._replace(beta=torch.ones_like(case.beta))
    state = run(case)["final_state"]
    held = torch.einsum("bhk,bhkv->bhv", case.k[:, 0], state)
    assert_close(held, case.v[:, 0], TOLERANCE)


def test_a_unit_key_with_strength_two_reflects_the_state() -> None:
    case = make_case(1, gated=False, tokens=1)
    case = case._replace(beta=torch.full_like(case.beta, 2.0), v=torch.zeros_like(case.v))
    assert case.initial_state is not None
    assert_close(run(case)["final_state"].square().sum(), case.initial_state.square().sum(), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_output_has_the_dtype_of_q_and_the_state_is_fp32(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype)
    found = run(case)
    assert found["output"].dtype == dtype
    assert found["final_state"].dtype == torch.float32
    wide = case._replace(**{name: getattr(case, name).double() for name in ("q", "k", "v", "beta", "g")})
    expected = dense_delta_product(wide._replace(initial_state=case.initial_state.double()))
    assert_close(found["final_state"], expected[1], 64 * torch.finfo(torch.float32).eps)
    assert_close(found["output"], expected[0], 64 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps)


@pytest.mark.parametrize("bounds", [None, (0,), (0, 0)])
def test_no_tokens_hand_the_state_on(bounds: tuple[int, ...] | None) -> None:
    case = make_case(tokens=0, bounds=bounds)
    found = run(case)
    assert found["output"].shape == (*case.q.shape[:2], *case.v.shape[2:])
    assert_same(found["final_state"], case.initial_state)
