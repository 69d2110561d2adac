"""What a rank sends is the same whether it is written into the buffer or put there afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gdn_cp import FramePartition, passes
from gdn_cp.cost_model import as_link
from gdn_cp.frame_gdn import make_plan
from gdn_cp.passes import RankPlan
from gdn_kernels.frame_gdn import stages
from gdn_kernels.types import Direction, FrameBoundary, FrameInputs, FrameOptions, Impl, Precision

B, H, F, S, D = 1, 3, 2, 4, 3  # D = 3: blocks of vectors are padded to 16 bytes
STATES = FrameBoundary._fields


def given(rank: int, save_transitions: bool, final: bool) -> tuple[RankPlan, FrameInputs, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    operands = (normal(B, F * S, H, D) for _ in range(3))
    gates = normal(B, H, F, S).sigmoid(), normal(B, H, F).sigmoid()
    inputs = FrameInputs(None, *operands, *gates, None, None, None, None, None)
    options = FrameOptions(
        False, True, True, Direction.BIDIRECTIONAL, (), 1.0, 1e-5, 0.1, Precision.IEEE, Impl.TORCH
    )  # fmt: skip
    initial = normal(B, H, D, D), normal(B, H, D)
    plan = make_plan(
        inputs, options, FrameBoundary(*initial, None, None), rank, 2, FramePartition((F, F)), None, final,
        save_transitions, "all_gather", as_link("nvlink"),
    )  # fmt: skip
    return plan, inputs, initial


@pytest.mark.parametrize("rank", [0, 1])
def test_forward_buffer_written_in_place_equals_the_packed_one(rank: int) -> None:
    plan, inputs, initial = given(rank, True, False)
    packed = passes.publish(plan, stages.begin(inputs, plan.options).summary, initial)
    run, own = passes.begin(plan, inputs, initial)
    assert torch.equal(own, packed)
    kept = plan.forward_layout().unpack(own)
    assert run.summary.transition_kv.data_ptr() == kept["transition_kv"].data_ptr()
    slot = torch.full_like(packed, torch.nan)
    assert passes.begin(plan, inputs, initial, slot)[1] is slot
    for name, x in plan.forward_layout().unpack(packed).items():
        assert torch.equal(plan.forward_layout().unpack(slot)[name], x), name


@pytest.mark.parametrize("save_transitions", [True, False])
@pytest.mark.parametrize("final", [None, "missing", "given"])
@pytest.mark.parametrize("rank", [0, 1])
def test_backward_buffer_written_in_place_equals_the_packed_one(
    rank: int, final: str | None, save_transitions: bool
) -> None:
    plan, inputs, initial = given(rank, save_transitions, final is not None)
    _, own = passes.begin(plan, inputs, initial)
    kept = own[None, : plan.transition_layout().offsets[-1]]
    entry = FrameBoundary(*initial, *(x.flip(-1) for x in initial))
    dresult = torch.randn(B, F * S, H, D)
    dfinal = (initial[0].mT, initial[1]) if final == "given" else (None, None)
    gamma = stages.adjoint(inputs, plan.options, entry, dresult, None).gamma
    packed = passes.publish_backward(plan, gamma, dfinal, kept)
    adjoint, sent = passes.begin_backward(plan, inputs, entry, (dresult, None), (), dfinal, kept)
    assert torch.equal(sent, packed)
    for name, x, y in zip(STATES, adjoint.gamma, gamma, strict=True):
        assert torch.equal(x, y), name
