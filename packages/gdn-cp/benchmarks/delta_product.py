"""The gated delta product on a context of one rank beside FLA's own operation: forward and training step.

    python delta_product.py                             # a CUDA device, bf16, the FLA backend, T = 8,192 and 32,768
    python delta_product.py tiny --device cpu --dtype float32 --backend torch --json delta_product.json

Times are medians in milliseconds of calls from Python. The same backend is held to the plain recurrence in fp64 first,
in the same run, on fewer tokens of the same heads and widths: nothing is timed if it is wrong. FLA tunes its kernels at
the first call, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from frame_gdn import check, environment, milliseconds, parse_shapes, parser_of, table
from torch import Tensor

from gdn_cp import CPContext
from gdn_cp.delta_product import (
    FLAGatedDeltaProductCPBackend,
    TorchGatedDeltaProductCPBackend,
    gdp_chunkwise_context_parallel,
)
from gdn_kernels.reference.delta_product import delta_product_reference

BACKENDS = {"fla": FLAGatedDeltaProductCPBackend, "torch": TorchGatedDeltaProductCPBackend}
Row = dict[str, Any]


class Shape(NamedTuple):
    """Tokens, tokens of the check, heads of keys and of values, channels, steps per token."""

    tokens: int
    checked: int
    heads: int
    value_heads: int
    width: int
    value_width: int
    steps: int


SHAPES = {
    "gdp_8192": Shape(8192, 200, 16, 16, 128, 128, 2),
    "gdp_32768": Shape(32768, 200, 16, 16, 128, 128, 2),
    "three_steps": Shape(32768, 200, 16, 16, 128, 128, 3),
    "narrow": Shape(32768, 200, 16, 16, 64, 64, 2),
    "wide": Shape(32768, 200, 8, 8, 256, 256, 2),
    "grouped": Shape(32768, 200, 8, 32, 128, 128, 2),
    "tiny": Shape(40, 20, 2, 4, 8, 4, 3),
}


def draw(shape: Shape, tokens: int, device: torch.device | str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, g and beta as leaves, and a gradient of the output."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    rows, heads = tokens * shape.steps, shape.value_heads
    k = torch.nn.functional.normalize(normal(1, rows, shape.heads, shape.width), dim=-1)
    leaves = [
        normal(1, tokens, shape.heads, shape.width).to(dtype), k.to(dtype),
        normal(1, rows, heads, shape.value_width).to(dtype), -0.1 * normal(1, tokens, heads).abs(),
        normal(1, rows, heads).sigmoid().to(dtype),
    ]  # fmt: skip
    return [x.requires_grad_() for x in leaves], normal(1, tokens, heads, shape.value_width).to(dtype)


def run(shape: Shape, leaves: Sequence[Tensor], backend: Any, context: CPContext | None = None) -> Tensor:
    """Run the operation over a context, of one rank if None."""
    output: Tensor = gdp_chunkwise_context_parallel(
        *leaves, None, shape.steps, shape.width**-0.5, None, backend, context=context or CPContext.single()
    )  # fmt: skip
    return output


def steps_of_fla(shape: Shape, leaves: Sequence[Tensor], doutput: Tensor) -> dict[str, Callable[[], Any]]:
    """Return what FLA's own operation can run of the two steps: its backward refuses some versions of Triton."""
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    heads = shape.value_heads // shape.heads

    def forward() -> Tensor:
        q, k, v, g, beta = leaves
        if heads > 1:  # which it does not know
            q, k = (x.repeat_interleave(heads, 2) for x in (q, k))
        output: Tensor = chunk_gated_delta_product(q, k, v, g, beta, shape.steps, shape.width**-0.5)[0]
        return output

    def fwd() -> Tensor:
        with torch.no_grad():
            return forward()

    def train() -> Any:
        return torch.autograd.grad(forward(), leaves, doutput)

    found: dict[str, Callable[[], Any]] = {"fla_fwd": fwd}
    try:
        train()
    except RuntimeError as refused:
        print(f"FLA's own training step is left out: {refused}")
    else:
        found["fla_train"] = train
    return found


def checked(shape: Shape, backend: Any, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Hold output and gradients to the plain recurrence in fp64; return the largest errors."""
    leaves, doutput = draw(shape, shape.checked, device, dtype)
    output = run(shape, leaves, backend)
    grads = torch.autograd.grad(output, leaves, doutput)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v, g, beta = exact
    reference = delta_product_reference(q, k, v, beta, g, num_householder=shape.steps, scale=shape.width**-0.5).output
    dexact = torch.autograd.grad(reference, exact, doutput.double())
    half = dtype.itemsize == 2
    return {
        "output_error": check("the output", [output], [reference], 5e-3 if half else 1e-5),
        "gradient_error": check("a gradient of q, k, v", grads[:3], dexact[:3], 8e-3 if half else 1e-5),
        "gate_error": check("a gradient of g, beta", grads[3:], dexact[3:], 2e-2 if half else 1e-5),
    }


def measure(name: str, options: argparse.Namespace) -> Row:
    """Check and time one shape."""
    shape, device, dtype = SHAPES[name], options.device, getattr(torch, options.dtype)
    backend = BACKENDS[options.backend]()
    row: Row = {"shape": name, **shape._asdict(), **checked(shape, backend, device, dtype)}
    leaves, doutput = draw(shape, shape.tokens, device, dtype)

    def forward() -> Tensor:
        with torch.no_grad():
            return run(shape, leaves, backend)

    def train() -> Any:
        return torch.autograd.grad(run(shape, leaves, backend), leaves, doutput)

    calls: dict[str, Callable[[], Any]] = {"fwd": forward, "train": train}
    if options.backend == "fla":
        calls |= steps_of_fla(shape, leaves, doutput)
    times = milliseconds(calls, device, options.repeats)
    row |= {f"{step}_ms": value for step, value in times.items()}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        train()
        row["peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return row


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, SHAPES)
    parser.add_argument("--backend", default="fla", choices=BACKENDS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    return parse_shapes(parser, arguments, SHAPES, ["gdp_8192", "gdp_32768"])


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure the shapes, print the table, write what was asked for, and return the rows."""
    options = parse(arguments)
    rows = [measure(name, options) for name in options.shapes]
    print(table(rows))
    about = {**environment(options.device), "dtype": options.dtype, "backend": options.backend}
    text = json.dumps({"environment": about, "rows": rows}, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)
    return rows


if __name__ == "__main__":
    main()
