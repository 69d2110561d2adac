"""Summaries, adjoint summaries and folds on a GPU: every row of the launch table against torch in fp64, twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from requirements import require_gpu
from torch import Tensor

require_gpu()
from clips import relative_error  # noqa: E402
from row_sweep import BOUNDS, DTYPES  # noqa: E402
from stage_cases import named_tensors  # noqa: E402
from table_rows import row_first  # noqa: E402

from gdn_kernels.frame_gdn import stages, tiles, triton_stages  # noqa: E402
from gdn_kernels.frame_gdn.fold import FoldLine, fold_lines  # noqa: E402
from gdn_kernels.types import (  # noqa: E402
    Direction,
    FrameBoundary,
    FrameInputs,
    FrameOptions,
    FrameSummary,
    Impl,
    Precision,
)

pytestmark = pytest.mark.gpu

WIDTHS = (16, 32, 64, 72, 96, 112, 128, 160, 256)
FRAMES, SPATIAL, HEADS = 5, 200, 3
ROWS = {name: max(len(rows) for rows in tiles.TABLE[name].values()) for name in ("summary", "adjoint_summary")}


class Run(NamedTuple):
    """One clip's forward on Triton, and the gradient of its output."""

    inputs: FrameInputs
    options: FrameOptions
    entry: FrameBoundary
    doutput: Tensor


def draw(width: int, precision: str) -> Run:
    generator = torch.Generator("cuda").manual_seed(width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    tokens = FRAMES * SPATIAL
    angle = 6 * normal(tokens, width // 2)
    inputs = FrameInputs(
        normal(1, tokens, 3, HEADS, width).to(DTYPES[precision]), None, None, None,
        normal(1, HEADS, FRAMES, SPATIAL).add(2).sigmoid(), normal(1, HEADS, FRAMES).add(3).sigmoid(),
        1 + 0.2 * normal(HEADS, width), 1 + 0.2 * normal(HEADS, width), angle.cos(), angle.sin(), None,
    )  # fmt: skip
    options = FrameOptions(
        True, True, True, Direction.BIDIRECTIONAL, (2,), (width * SPATIAL) ** -0.5, 1e-5, 1e-6, Precision(precision),
        Impl.TRITON,
    )  # fmt: skip
    kv, z = 0.1 * normal(2, 1, HEADS, width, width), 0.1 * normal(2, 1, HEADS, width).abs()
    return Run(inputs, options, FrameBoundary(kv[0], z[0], kv[1], z[1]), normal(1, tokens, HEADS, width))


def double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def flat(summary: FrameSummary) -> dict[str, Tensor]:
    return named_tensors({"E_kv": summary.transition_kv, "E_z": summary.transition_z}, summary.increment)


@pytest.fixture(autouse=True)
def memory_that_nobody_wrote_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def compare(found: list[dict[str, Tensor]], exact: dict[str, Tensor], bound: float) -> None:
    """Two runs are equal to the bit and within the bound of the exact values."""
    assert found[0].keys() == exact.keys()
    errors = {name: relative_error(found[0][name], x) for name, x in exact.items()}
    print(errors)
    for name, value in errors.items():
        assert value <= bound, f"{name}: {value:.2e}"
        assert torch.equal(found[0][name], found[1][name]), name


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_row_of_the_summaries_is_right_and_repeats_its_bits(width: int, precision: str) -> None:
    inputs, options, entry, doutput = draw(width, precision)
    wide = FrameInputs(*(double(x) for x in inputs))  # type: ignore[arg-type]
    in_torch = dataclasses.replace(options, impl=Impl.TORCH)
    exact = flat(stages.summarize(wide, in_torch))
    wide_entry = FrameBoundary(*(double(x) for x in entry))
    exact_gamma = named_tensors(stages.adjoint(wide, in_torch, wide_entry, doutput.double(), None).gamma)
    prepared = triton_stages.prepare(inputs, options)
    _, _, transitions = triton_stages.write(prepared)
    read = triton_stages.forward(prepared, options, entry, want_exit=False)
    read_out = triton_stages.read_out_backward(
        prepared, read.saved, read.result, read.denominator, doutput.to(inputs.qkv.dtype), None,
        triton_stages.gradient_buffers(inputs),
    )  # fmt: skip
    common = (prepared.call, transitions, prepared.decay, options.direction, options.resets)
    for row in range(ROWS["summary"]):
        with row_first(row):
            found = [flat(triton_stages.summary(*common)) for _ in range(2)]
        compare(found, exact, BOUNDS[precision][0])
    for row in range(ROWS["adjoint_summary"]):
        with row_first(row):
            gammas = [named_tensors(triton_stages.adjoint_summary(*common, read_out.c, read_out.cz)) for _ in range(2)]
        compare(gammas, exact_gamma, BOUNDS[precision][1])


@pytest.mark.parametrize("width", WIDTHS)
def test_folds_of_both_streams_and_directions_are_right_and_repeat_their_bits(width: int) -> None:
    size = 5
    generator = torch.Generator("cuda").manual_seed(width)
    e, e_z, h, back = torch.randn(4, size, 2, 3, width, width, generator=generator, device="cuda")
    e, e_z = e / width**0.5, e_z / width**0.5
    h_z, back_z = torch.randn(2, size, 2, 3, width, generator=generator, device="cuda")
    lines = [
        FoldLine((e, e_z), (h, h_z), (h[0], h_z[0]), range(size)),
        FoldLine((e, e_z), (back, back_z), (None, None), range(size - 1, 0, -1), transposed=True, dropped=(2,)),
    ]
    found = [fold_lines(lines) for _ in range(2)]
    for line, states, again in zip(lines, *found, strict=True):
        for factors, increments, start, x, y in zip(*line[:3], states, again, strict=True):
            assert torch.equal(x, y)
            state = torch.zeros_like(increments[0]) if start is None else start
            exact = [state.double()]
            for r in line.order:
                factor = factors[r].double().mT if line.transposed else factors[r].double()
                column = exact[-1][..., None] if x.ndim == 4 else exact[-1]
                moved = (factor @ column).reshape(state.shape) if r not in line.dropped else 0
                exact.append(moved + increments[r].double())
            assert relative_error(x, torch.stack(exact)) <= 2e-6
