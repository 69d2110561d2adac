"""The stages with Triton in the interpreter against torch in fp64: summaries, runs from entry states, adjoints."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from agreement import assert_close, error
from frame_gdn_cases import DIRECTIONS, KINDS
from requirements import require_interpreter
from stage_cases import cut, entry_of, named_tensors, stage_inputs, stage_options
from torch import Tensor

require_interpreter()
from gdn_kernels.frame_gdn import stages  # noqa: E402
from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions, FrameSummary, Impl  # noqa: E402

pytestmark = pytest.mark.interpret

SIZES = (1, 2, 3, 4, 8)
MASK = torch.tensor([[True, False, True]])
EPS = 0.1
IMPLEMENTATIONS = ((Impl.TORCH, torch.float64), (Impl.TORCH, torch.float32), (Impl.TRITON, torch.float32))


def values(x: FrameInputs | FrameBoundary, dtype: torch.dtype) -> list[Tensor | None]:
    return [y if y is None or not y.is_floating_point() else y.detach().to(dtype) for y in x]


def random_like(x: Tensor | None, seed: int) -> Tensor | None:
    if x is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)


def every_stage(
    inputs: FrameInputs, options: FrameOptions, entry: FrameBoundary, silent: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return what both steps of `begin` and of `adjoint`, and the exits of `apply` give, by name."""
    run = stages.begin(inputs, options)
    summary = run.summary
    run.overlap()
    result, denominator, saved = run.finish(entry)
    applied, _, exits = stages.apply(inputs, options, entry)
    assert torch.equal(applied, result)
    dresult = None if "result" in silent else random_like(result, 1)
    ddenominator = None if "denominator" in silent else random_like(denominator, 2)
    adjoint = stages.adjoint(inputs, options, entry, dresult, ddenominator, saved)
    adjoint.overlap()
    exit_gradient = FrameBoundary(*(random_like(x, 3 + i) for i, x in enumerate(exits)))
    if "exits" in silent:
        exit_gradient = FrameBoundary(None, None, None, None)
    needs = [True] * 8 + [False] * 3  # tables and mask have none
    gradients = adjoint.finish(exit_gradient, needs)
    again = stages.adjoint(inputs, options, entry, dresult, ddenominator).finish(exit_gradient, needs)
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(again, gradients, strict=True))
    groups = {
        "increment": summary.increment, "exit": exits, "gamma": adjoint.gamma, "d": gradients,
    }  # fmt: skip
    found = {f"{group} {name}": x for group, t in groups.items() for name, x in named_tensors(t).items()}
    single = {
        "transition_kv": summary.transition_kv, "transition_z": summary.transition_z, "result": result,
        "denominator": denominator,
    }  # fmt: skip
    return {**found, **named_tensors(single)}


def assert_stages_agree(
    inputs: FrameInputs, options: FrameOptions, entry: FrameBoundary, silent: tuple[str, ...] = ()
) -> None:
    exact, rounded, found = (
        every_stage(
            FrameInputs(*values(inputs, dtype)), dataclasses.replace(options, impl=impl),
            FrameBoundary(*values(entry, dtype)), silent,
        )
        for impl, dtype in IMPLEMENTATIONS
    )  # fmt: skip
    assert found.keys() == exact.keys()
    # Another order of the same sums: eight times what fp32 costs the torch implementation.
    tolerance = 8.0 * max(4 * torch.finfo(torch.float32).eps, *(error(rounded[name], exact[name]) for name in exact))
    for name, value in exact.items():
        assert_close(found[name], value, tolerance, name)


@pytest.mark.parametrize("resets", [(), (0, 2)], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_stages_agree_with_torch(kind: str, direction: str, resets: tuple[int, ...]) -> None:
    if direction == "forward" and resets:
        direction, resets = "bidirectional", (1,)
    inputs, options = stage_inputs(kind, SIZES, mask=MASK), stage_options(kind, direction, resets=resets, eps=EPS)
    assert_stages_agree(inputs, options, entry_of(inputs, options))


@pytest.mark.parametrize("silent", [("result",), ("denominator",), ("exits",), ("result", "denominator")], ids=str)
def test_adjoint_takes_a_missing_gradient_for_zero(silent: tuple[str, ...]) -> None:
    inputs, options = stage_inputs("raw", (1, 1, 2, 4, 8)), stage_options("raw", "bidirectional")
    assert_stages_agree(inputs, options, entry_of(inputs, options), silent)


@pytest.mark.parametrize("frames", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_stages_agree_on_empty_and_single_frames(kind: str, direction: str, frames: int) -> None:
    inputs, options = stage_inputs(kind, (1, 2, frames, 4, 8)), stage_options(kind, direction, eps=EPS)
    assert_stages_agree(inputs, options, entry_of(inputs, options))


def test_summaries_of_two_channel_blocks_agree_with_torch() -> None:
    inputs, options = stage_inputs("raw", (1, 1, 2, 3, 136)), stage_options("raw", "bidirectional", resets=(1,))
    found = stages.summarize(
        FrameInputs(*values(inputs, torch.float32)), dataclasses.replace(options, impl=Impl.TRITON)
    )
    exact = stages.summarize(FrameInputs(*values(inputs, torch.float64)), options)
    # two frames of products over at most 136 channels: each entry gathers a few hundred roundings at random
    assert_close(found.transition_kv, exact.transition_kv, 1e-5)
    assert found.transition_z is not None
    assert exact.transition_z is not None
    assert_close(found.transition_z, exact.transition_z, 1e-5)
    for name, value in named_tensors(exact.increment).items():
        assert_close(getattr(found.increment, name), value, 1e-5, name)


def test_runs_joined_through_their_exits_are_the_whole_run() -> None:
    inputs, options = stage_inputs("raw", (1, 1, 4, 3, 8)), stage_options("raw", "forward")
    inputs, options = FrameInputs(*values(inputs, torch.float32)), dataclasses.replace(options, impl=Impl.TRITON)
    entry = FrameBoundary(*values(entry_of(inputs, options), torch.float32))
    whole, _, whole_exit = stages.apply(inputs, options, entry)
    head, _, between = stages.apply(*cut(inputs, options, 0, 1), entry)
    tail, _, exits = stages.apply(*cut(inputs, options, 1, 4), between)
    assert torch.equal(torch.cat([head, tail], 1), whole)
    assert exits.forward_kv is not None
    assert whole_exit.forward_kv is not None
    assert torch.equal(exits.forward_kv, whole_exit.forward_kv)


def test_exits_that_are_not_wanted_are_none() -> None:
    inputs, options = stage_inputs("raw", (1, 1, 1, 3, 8), dtype=torch.float32), stage_options("raw", "bidirectional")
    options = dataclasses.replace(options, impl=Impl.TRITON)
    *_, exits = stages.apply(inputs, options, FrameBoundary(None, None, None, None), want_exit=False)
    assert exits == FrameBoundary(None, None, None, None)


@pytest.mark.parametrize("impl", [Impl.TORCH, Impl.TRITON])
def test_summaries_are_written_where_the_caller_wants_them(impl: Impl) -> None:
    """Into views of one buffer, as it will be sent; the same bits as in tensors of their own."""
    inputs, options = stage_inputs("raw", (1, 1, 3, 3, 8)), stage_options("raw", "bidirectional", resets=(1,))
    inputs, options = FrameInputs(*values(inputs, torch.float32)), dataclasses.replace(options, impl=impl)
    entry = FrameBoundary(*values(entry_of(inputs, options), torch.float32))
    run = stages.begin(inputs, options)
    result, _, saved = run.finish(entry)
    gamma = stages.adjoint(inputs, options, entry, result, None, saved).gamma
    square, vector = [1, 1, 8, 8], [1, 1, 8]
    buffer = torch.full((6, 64), torch.nan)
    kv, z, *rest = (x[: 8 if i in (3, 5) else 64] for i, x in enumerate(buffer))
    shapes = [square, vector, square, vector]
    increment = FrameBoundary(*(x.view(shape) for x, shape in zip(rest, shapes)))
    into = FrameSummary(kv.view(square), z.view(square), increment)
    assert stages.begin(inputs, options, into).summary is into
    assert torch.equal(into.transition_kv, run.summary.transition_kv)
    assert into.transition_z is not None
    assert run.summary.transition_z is not None
    assert torch.equal(into.transition_z, run.summary.transition_z)
    for name, value in named_tensors(run.summary.increment).items():
        assert torch.equal(getattr(increment, name), value), name
    assert stages.adjoint(inputs, options, entry, result, None, saved, increment).gamma is increment
    for name, value in named_tensors(gamma).items():
        assert torch.equal(getattr(increment, name), value), name
