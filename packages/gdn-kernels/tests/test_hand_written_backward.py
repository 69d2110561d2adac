"""The backward by hand equals autograd: one equation of the written ones wrong and this fails."""

import pytest
import torch
from agreement import assert_all_close, assert_close, error
from frame_gdn_cases import DIRECTIONS, KINDS, MASK, upstream
from hand_written_backward import backward_by_phases, forward_by_phases
from stage_cases import entry_of, named_tensors, stage_inputs, stage_options
from torch import Tensor

from gdn_kernels.frame_gdn import stages
from gdn_kernels.types import FrameBoundary, FrameInputs

TOLERANCE = 1e-12


def autograd_of(
    inputs: FrameInputs, entry: FrameBoundary, results: dict[str, Tensor], incoming: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of every input and entry state that has one."""
    wanted = {name: value for name, value in named_tensors(inputs, entry).items() if value.requires_grad}
    live = [name for name, value in results.items() if value.requires_grad]
    found = torch.autograd.grad(
        [results[name] for name in live], list(wanted.values()), [incoming[name] for name in live],
        materialize_grads=True, allow_unused=True,
    )  # fmt: skip
    return dict(zip(wanted, found, strict=True))


@pytest.mark.parametrize("resets", [(), (1, 3), (0, 2, 4)])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "mask"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_by_phases_equals_autograd(
    kind: str, direction: str, mask: Tensor | None, resets: tuple[int, ...]
) -> None:
    inputs, options = stage_inputs(kind, mask=mask), stage_options(kind, direction, resets=resets, eps=0.05)
    entry = entry_of(inputs, options)
    result, denominator, exits = stages.apply(inputs, options, entry)
    results = named_tensors({"result": result, "denominator": denominator}, exits)
    incoming = upstream(results)
    expected = autograd_of(inputs, entry, results, incoming)
    with torch.no_grad():
        saved = forward_by_phases(inputs, options, entry)
        found = backward_by_phases(
            inputs, options, entry, saved, incoming["result"], incoming.get("denominator"),
            FrameBoundary(*(incoming.get(name) for name in FrameBoundary._fields)),
        )  # fmt: skip
    raw = None if kind == "output" else saved.denominator  # kept for the backward, returned only if not divided by
    assert_all_close(named_tensors({"result": saved.result, "denominator": raw}, saved.exits), results, TOLERANCE)
    assert_all_close(named_tensors(*found), expected, TOLERANCE)


@pytest.mark.parametrize("without", [("q_norm_weight",), ("k_norm_weight",), ("q_norm_weight", "k_norm_weight")])
def test_backward_by_phases_with_a_norm_weight_left_out(without: tuple[str, ...]) -> None:
    inputs, options = stage_inputs("raw", without=without), stage_options("raw", "bidirectional", norm_eps=0.3)
    entry = entry_of(inputs, options)
    result, denominator, exits = stages.apply(inputs, options, entry)
    results = named_tensors({"result": result, "denominator": denominator}, exits)
    incoming = upstream(results)
    saved = forward_by_phases(inputs, options, entry)
    exit_gradient = FrameBoundary(*(incoming[name] for name in FrameBoundary._fields))
    with torch.no_grad():
        found = backward_by_phases(
            inputs, options, entry, saved, incoming["result"], incoming["denominator"], exit_gradient
        )
    assert_all_close(named_tensors(*found), autograd_of(inputs, entry, results, incoming), TOLERANCE)


def test_backward_from_an_output_rounded_to_bf16_is_as_good_as_from_a_rounded_numerator() -> None:
    """So a backward keeps the output, which exists anyway, and no numerator."""
    inputs, options = stage_inputs("output"), stage_options("output", "bidirectional", eps=0.05)
    entry, zeros = entry_of(inputs, options), FrameBoundary(None, None, None, None)
    with torch.no_grad():
        saved = forward_by_phases(inputs, options, entry)
        assert saved.denominator is not None
        divisor = saved.denominator.mT[..., None] + options.eps
        kept = (saved.result, saved.result.bfloat16().double(), (saved.result * divisor).bfloat16() / divisor)
        dout = upstream({"result": saved.result})["result"]
        exact, from_output, from_numerator = (
            backward_by_phases(inputs, options, entry, saved._replace(result=x), dout, None, zeros)[0].qkv for x in kept
        )
    q_and_k = (slice(None), slice(None), slice(0, 2))
    assert_close(from_output[:, :, 2], exact[:, :, 2], 0.0, "dv, which does not see the denominator")
    of_numerator = error(from_numerator[q_and_k], exact[q_and_k])
    assert 0 < error(from_output[q_and_k], exact[q_and_k]) <= 2 * of_numerator < 2**-6
