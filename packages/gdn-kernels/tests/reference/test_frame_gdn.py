"""The torch reference with states at both ends, which no public operation shows, against the token-by-token loop."""

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same
from frame_gdn_cases import DIRECTIONS, K_SCALE, KINDS, MASK, B, D, H, S, upstream
from sequential_frame_gdn import sequential_frame_gdn
from stage_cases import entry_of, named_tensors, stage_inputs, stage_options
from torch import Tensor

from gdn_kernels.reference.frame_gdn import frame_gdn_reference, frame_transitions, summarize_reference
from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions

TOLERANCE = 1e-12


def loop(inputs: FrameInputs, options: FrameOptions, entry: FrameBoundary) -> dict[str, Tensor]:
    """Return result, denominator and exits of the sequential loop, by name."""
    q, k, v = inputs.operands()
    states = []
    for kv, z in ((entry.forward_kv, entry.forward_z), (entry.reverse_kv, entry.reverse_z)):
        states.append(None if kv is None else (kv, torch.zeros_like(kv[..., 0]) if z is None else z))
    found = sequential_frame_gdn(
        q, k, v, inputs.beta, inputs.decay, direction=options.direction.value, features=options.features,
        cos=inputs.rope_cos, sin=inputs.rope_sin, q_norm_weight=inputs.q_norm_weight,
        k_norm_weight=inputs.k_norm_weight, norm_eps=options.norm_eps, k_scale=K_SCALE, chunk_starts=options.resets,
        frame_valid=inputs.frame_valid, forward=states[0], reverse=states[1],
    )  # fmt: skip
    exits = {name: getattr(found, name) for name in FrameBoundary._fields if getattr(entry, name) is not None}
    if not options.has_z:
        return {"result": found.numerator, **exits}
    if not options.divide:
        return {"result": found.numerator, "denominator": found.denominator, **exits}
    output = found.numerator / (found.denominator.mT[..., None] + options.eps)
    return {"result": output, **exits}  # the denominator has been divided by


@pytest.mark.parametrize("resets", [(), (1, 3), (0, 2, 4)])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "mask"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_reference_with_entry_states_agrees_with_the_sequential_loop(
    kind: str, direction: str, mask: Tensor | None, resets: tuple[int, ...]
) -> None:
    inputs, options = stage_inputs(kind, mask=mask), stage_options(kind, direction, resets=resets, eps=0.05)
    entry = entry_of(inputs, options)
    result, denominator, exits = frame_gdn_reference(inputs, options, entry)
    found = named_tensors({"result": result, "denominator": denominator}, exits)
    expected = loop(inputs, options, entry)
    assert_all_close(found, expected, TOLERANCE)
    incoming = upstream(expected)
    leaves = {name: value for name, value in named_tensors(inputs, entry).items() if value.requires_grad}
    both = []
    for results in (found, expected):
        live = [name for name in results if results[name].requires_grad]
        both.append(
            torch.autograd.grad(
                [results[name] for name in live], list(leaves.values()), [incoming[name] for name in live],
                materialize_grads=True, allow_unused=True,
            )
        )  # fmt: skip
    assert_all_close(*(dict(zip(leaves, gradients, strict=True)) for gradients in both), TOLERANCE)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_frames_gives_every_input_a_gradient_of_zeros(kind: str, direction: str) -> None:
    """None would make a wrapper that averages over ranks wait; the states pass through."""
    inputs, options = stage_inputs(kind, (B, H, 0, S, D)), stage_options(kind, direction)
    entry = entry_of(inputs, options)
    result, denominator, exits = frame_gdn_reference(inputs, options, entry)
    assert result.shape == (B, 0, H, D)
    assert_all_close(named_tensors(exits), named_tensors(entry), 0)
    total = result.sum() + (0 if denominator is None else denominator.sum())
    leaves = {name: value for name, value in named_tensors(inputs, entry).items() if value.requires_grad}
    gradients = torch.autograd.grad(total, list(leaves.values()))
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert gradient.shape == leaf.shape, name
        assert not gradient.any(), name


def test_transitions_are_what_they_are_called() -> None:
    k, kr, v = torch.randn(3, 2, 3, 5, 7, 4, dtype=torch.float64)
    beta = torch.rand(2, 3, 5, 7, dtype=torch.float64)
    p_kv, a, p_z, b = frame_transitions(k, kr, v, beta)
    assert_close(p_kv, torch.einsum("bhfsi,bhfs,bhfsj->bhfij", kr, beta, kr), 1e-14)
    assert_close(a, torch.einsum("bhfsi,bhfs,bhfsj->bhfij", kr, beta, v), 1e-14)
    assert_close(p_z, torch.einsum("bhfsi,bhfs,bhfsj->bhfij", k, beta, k), 1e-14)
    assert_close(b, torch.einsum("bhfsi,bhfs->bhfi", k, beta), 1e-14)
    assert frame_transitions(None, kr, v, beta)[2:] == (None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transitions_are_symmetric_to_the_last_bit(dtype: torch.dtype) -> None:
    """Only then is the reverse transition of a run the transpose of the forward one for rounded operators too."""
    k, kr, v = torch.randn(3, 2, 3, 2, 65, 33, dtype=dtype)
    p_kv, _, p_z, _ = frame_transitions(k, kr, v, torch.rand(2, 3, 2, 65, dtype=dtype))
    for p in (p_kv, p_z):
        assert_same(p, p.mT.contiguous())
        assert torch.linalg.eigvalsh(p.double()).min() > -1e-5 * p.abs().max()


def test_summaries_are_not_differentiable() -> None:
    inputs, options = stage_inputs("raw"), stage_options("raw", "bidirectional")
    summary = summarize_reference(inputs, options)
    parts = [summary.transition_kv, summary.transition_z, *summary.increment]
    assert not any(part.requires_grad for part in parts)


def test_reference_computes_in_the_state_dtype_under_autocast() -> None:
    """FC-A08: autocast would turn the products into bf16 ones."""
    inputs, options = stage_inputs("raw", dtype=torch.float32), stage_options("raw", "bidirectional")
    entry = entry_of(inputs, options)
    plain = frame_gdn_reference(inputs, options, entry)[0], summarize_reference(inputs, options).transition_kv
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = frame_gdn_reference(inputs, options, entry)[0], summarize_reference(inputs, options).transition_kv
    for here, there in zip(found, plain, strict=True):
        assert_same(here, there)
