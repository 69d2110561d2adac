"""One clip through one row of the launch table on the GPU, in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import torch
from clips import draw_clip, draw_gradient, errors, output_and_gradients
from shapes import Shape
from table_rows import row_first

# Relative Frobenius errors of the output and of the worst gradient, by precision. Rounding an exact result to bf16
# alone costs 1.7e-3, and inputs and gradients of the first two are bf16.
BOUNDS = {"bf16": (4e-3, 1e-2), "tf32": (2e-3, 1e-2), "ieee": (2e-6, 1e-5)}
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.bfloat16, "ieee": torch.float32}


class Case(NamedTuple):
    """Width of the heads, precision, number of the row."""

    width: int
    precision: str
    row: int


def sweep(case: Case, device: str = "cuda", shape: tuple[int, int, int, int] = (1, 2, 200, 4)) -> dict[str, object]:
    """Return the errors of output and gradients, and whether a second run gave the same bits.

    Memory that no kernel writes holds NaN, so that an error is infinite where a tile was missed.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    clip = draw_clip(Shape(*shape, case.width, ""), DTYPES[case.precision], device)
    doutput = draw_gradient(clip)
    with row_first(case.row):
        found = errors(clip, doutput, "triton", precision=case.precision)
        runs = [output_and_gradients(clip, doutput, "triton", precision=case.precision) for _ in range(2)]
    same = {name: torch.equal(value, runs[1][name]) for name, value in runs[0].items()}
    return {"errors": found, "same": same}
