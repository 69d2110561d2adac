"""Options are values: comparable, hashable, with the directions and dtypes they promise."""

import dataclasses

import pytest
import torch
from stage_cases import stage_inputs, stage_options

from gdn_kernels import Direction, Impl, Precision


@pytest.mark.parametrize(
    "direction, past, future", [("forward", True, False), ("reverse", False, True), ("bidirectional", True, True)]
)
def test_directions_know_which_scans_they_need(direction: str, past: bool, future: bool) -> None:
    assert Direction(direction).reads_past is past
    assert Direction(direction).reads_future is future


@pytest.mark.parametrize("kind", [Direction, Precision, Impl])
def test_options_are_strings(kind: type) -> None:
    for member in kind:
        assert member == member.value
        assert kind(member.value) is member


@pytest.mark.parametrize("kind", ["raw", "numerator"])
def test_inputs_give_their_operands_in_either_form(kind: str) -> None:
    inputs = stage_inputs(kind)
    q, k, v = inputs.operands()
    if kind == "raw":
        assert all(torch.equal(x, inputs.qkv[:, :, i]) for i, x in enumerate((q, k, v)))
    else:
        assert (q, k, v) == (inputs.q, inputs.k, inputs.v)


@pytest.mark.parametrize(
    "dtype, expected",
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
    + [(torch.float64, torch.float64)],
)
@pytest.mark.parametrize("kind", ["raw", "numerator"])
def test_states_are_fp32_or_fp64(kind: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    assert stage_inputs(kind, dtype=dtype).state_dtype == expected


def test_options_of_a_call_are_hashable_and_frozen() -> None:
    one, same = (
        stage_options("raw", "bidirectional", resets=(1, 2)),
        stage_options("raw", "bidirectional", resets=(1, 2)),
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one != dataclasses.replace(one, resets=())
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.eps = 1.0
