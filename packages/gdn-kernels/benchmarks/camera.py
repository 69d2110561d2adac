"""Time `camera_operands` and `camera_output` against the bytes they must move, after checking them against fp64.

    python camera.py                             # the camera branch of 11 and of 61 frames
    python camera.py tune_11 --json camera.json

Rows are milliseconds, medians of replays of a captured CUDA graph (of calls on the CPU): ``fwd`` without and ``train``
with the backward, ``prep`` the operands and ``out`` the output transform; ``floor`` is the bytes that must move once
over the copy bandwidth measured at the start, ``ratio`` the time over it. Errors: relative Frobenius against fp64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from clips import relative_error
from measuring import aligned, captured, environment, parse_shapes, parser_of
from run import copy_bandwidth, milliseconds
from shapes import SHAPES, Shape
from torch import Tensor

import gdn_kernels
from gdn_kernels import RayTransforms, RotaryTables, camera_operands, camera_output, camera_rotary_tables, rotary_tables

DEFAULT = ("tune_11", "wm_61")
STEPS = ("prep_fwd", "prep_train", "out_fwd", "out_train")
COLUMNS = (*(f"{kind}{step}" for step in STEPS for kind in ("floor_", "", "ratio_")), "error", "error_gradient")
BOUNDS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}  # rounding, a few units in fp32
Row = dict[str, Any]


class Inputs(NamedTuple):
    """Arguments of both operations and gradients of their results; the first six are leaves."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor
    k_weight: Tensor
    x: Tensor
    rays: RayTransforms
    rope: RotaryTables
    frames: int
    douts: tuple[Tensor, ...]

    def double(self) -> Inputs:
        """Return the same values in fp64, as leaves of their own."""
        leaves = (x.detach().double().requires_grad_() for x in self[:6])
        return Inputs(*leaves, self.rays, self.rope, self.frames, tuple(x.double() for x in self.douts))

    def operands(self, impl: str) -> tuple[Tensor, ...]:
        """Prepare q, k and v."""
        return camera_operands(
            self.q, self.k, self.v, self.rays, frames=self.frames, rope=self.rope, q_norm_weight=self.q_weight,
            k_norm_weight=self.k_weight, k_scale=0.1, impl=impl,
        )  # fmt: skip

    def output(self, impl: str) -> Tensor:
        """Transform what the scan read, fp32 in and the dtype of q out."""
        return camera_output(self.x, self.rays, rope=self.rope, dtype=self.q.dtype, impl=impl)

    def operand_gradients(self, impl: str) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v and the weights."""
        return torch.autograd.grad(self.operands(impl), self[:5], self.douts[:4])

    def output_gradient(self, impl: str) -> tuple[Tensor, ...]:
        """Return the gradient of x."""
        return torch.autograd.grad(self.output(impl), self.x, self.douts[4])


def draw(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """Return random operands, and cameras a few units away from the origin."""
    batch, frames, spatial, heads, width, _ = shape
    tokens = frames * spatial
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, device=device, generator=generator).to(to)

    rotation = torch.linalg.qr(normal(batch, tokens, 3, 3, to=torch.float32))[0]
    center = normal(batch, tokens, 3, 1, to=torch.float32)
    last = torch.tensor([0.0, 0.0, 0.0, 1.0], device=device).expand(batch, tokens, 1, 4)
    to_ray = torch.cat((torch.cat((rotation.mT, -rotation.mT @ center), -1), last), -2)
    to_world = torch.cat((torch.cat((rotation, center), -1), last), -2)
    rope = camera_rotary_tables(rotary_tables((frames, 1, spatial), width, device=device))
    size = (batch, tokens, heads, width)
    douts = (normal(*size), normal(*size), normal(*size), normal(batch, heads, frames, to=torch.float32), normal(*size))
    leaves = (normal(*size), normal(*size), normal(*size), 1 + normal(heads * width) / 8, 1 + normal(heads * width) / 8)
    return Inputs(
        *(x.requires_grad_() for x in (*leaves, normal(*size, to=torch.float32))),
        RayTransforms(to_ray, to_world), rope, frames, douts,
    )  # fmt: skip


def moved_bytes(shape: Shape, size: int) -> dict[str, int]:
    """Return the bytes that each step must move once, for elements of ``size`` bytes."""
    rows = shape.batch * shape.tokens
    one = rows * shape.heads * shape.width
    table = shape.tokens * shape.width // 2 * 4
    matrix = rows * 64
    prep, prep_back = 6 * one * size + 2 * matrix + table, 8 * one * size + 2 * matrix + table
    out = one * (4 + size) + matrix + table
    return {"prep_fwd": prep, "prep_train": prep + prep_back, "out_fwd": out, "out_train": 2 * out}


def errors(inputs: Inputs, impl: str) -> tuple[float, float]:
    """Return the worst error of a result and of a gradient against fp64."""
    wide = inputs.double()
    with torch.no_grad():
        results = (*inputs.operands(impl), inputs.output(impl))
        worst = max(map(relative_error, results, (*wide.operands("torch"), wide.output("torch"))))
    found = (*inputs.operand_gradients(impl), *inputs.output_gradient(impl))
    exact = (*wide.operand_gradients("torch"), *wide.output_gradient("torch"))
    return worst, max(map(relative_error, found, exact))


def measure(name: str, shape: Shape, options: argparse.Namespace, bandwidth: float) -> Row:
    """Check one shape, then time it."""
    device, dtype = options.device, getattr(torch, options.dtype)
    inputs = draw(shape, dtype, device, options.seed)
    row: Row = {"shape": name, **shape._asdict(), "dtype": options.dtype, "impl": options.impl}
    row["error"], row["error_gradient"] = errors(inputs, options.impl)
    for column in ("error", "error_gradient"):
        if not row[column] <= BOUNDS[dtype]:
            raise SystemExit(f"{name}: relative {column} {row[column]:.2e} against fp64 is above {BOUNDS[dtype]:.2e}")

    def without_graph(call: Callable[[str], object]) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return call(options.impl)

        return run

    calls = {
        "prep_fwd": without_graph(inputs.operands), "prep_train": lambda: inputs.operand_gradients(options.impl),
        "out_fwd": without_graph(inputs.output), "out_train": lambda: inputs.output_gradient(options.impl),
    }  # fmt: skip
    for step, size in moved_bytes(shape, dtype.itemsize).items():
        call = captured(calls[step]).replay if device == "cuda" else calls[step]
        row[f"floor_{step}"] = 1e3 * size / bandwidth
        row[step] = milliseconds(call, device, options.repeats)
        row[f"ratio_{step}"] = row[step] / row[f"floor_{step}"]
    return row


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, one line a column because there are many."""
    lines = [["shape", *(row["shape"] for row in rows)]]
    for column in COLUMNS:
        form = "{:.1e}" if column.startswith("error") else "{:.3f}"
        lines.append([column, *(form.format(row[column]) for row in rows)])
    return aligned(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--impl", default="auto", choices=("auto", "torch", "triton"))
    parser.add_argument("--repeats", type=int, default=20, help="runs on the CPU; five milliseconds of runs on a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parse_shapes(parser, arguments, SHAPES, DEFAULT)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure the shapes, print the table, write what was asked for, and return the rows."""
    options = parse(arguments)
    bandwidth = copy_bandwidth(options.device, options.repeats)
    about = {**environment(options.device), "gdn_kernels": gdn_kernels.__version__, "copy_bandwidth": bandwidth}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    rows = [measure(name, SHAPES[name], options, bandwidth) for name in options.shapes]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"environment": about, "rows": rows}, indent=2))
    return rows


if __name__ == "__main__":
    main()
