"""Time `frame_gdn` against the bytes it must move, after checking it against fp64 in the same run.

    python run.py                                   # the three shapes that figures are quoted for
    python run.py stream_3 --direction forward --state
    python run.py wm_121 --compare eager sdpa --json times.json --png times.png

Columns are milliseconds, medians: ``floor`` is the bytes that must move once over the copy bandwidth measured at the
start; ``eager`` is a call from Python, ``graph`` the replay of a captured CUDA graph; ``peak`` is memory beyond the
inputs, in MB; errors are relative Frobenius against fp64, the worst of the gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from clips import Clip, draw_clip, draw_gradient, errors, mix
from measuring import aligned, captured, environment, parse_shapes, parser_of
from shapes import HEADLINE, SHAPES, Shape
from torch import Tensor

import gdn_kernels

COMPARISONS = ("eager", "compile", "sdpa")
COLUMNS = (
    "floor_fwd", "eager_fwd", "graph_fwd", "floor_train", "eager_train", "graph_train", "peak", "error_output",
    "error_gradient",
)  # fmt: skip
Row = dict[str, Any]


def milliseconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of ``call``; on a GPU caches are flushed before each run."""
    if device == "cuda":
        import triton.testing

        return float(triton.testing.do_bench(call, warmup=25, rep=max(repeats, 1) * 5, return_mode="median"))
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def copy_bandwidth(device: str, repeats: int) -> float:
    """Return bytes per second of a large copy, reads and writes both counted."""
    source = torch.empty(2**30 if device == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-3 * milliseconds(lambda: target.copy_(source), device, repeats))


def peak_megabytes(call: Callable[[], object], device: str) -> float | None:
    """Return the most memory that ``call`` held beyond what was there before it."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    del result
    return peak


def steps(clip: Clip, doutput: Tensor, forward: Callable[[], Tensor]) -> tuple[Callable[[], Tensor], Callable[[], Any]]:
    """Return an inference step and a training step of ``forward``."""

    def infer() -> Tensor:
        with torch.no_grad():
            return forward()

    def train() -> Any:
        return torch.autograd.grad(forward(), clip.leaves(), doutput, allow_unused=True)

    return infer, train


def attention(clip: Clip) -> Tensor:
    """Return softmax attention over all tokens of the clip: what a model without the recurrence would run."""
    q, k, v = (x.transpose(1, 2) for x in clip.qkv.unbind(2))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def contender(name: str, clip: Clip) -> Callable[[], Tensor]:
    """Return the forward of one comparison: the reference, the reference compiled, or softmax attention."""
    if name == "sdpa":
        return lambda: attention(clip)
    function = torch.compile(mix) if name == "compile" else mix
    return lambda: function(clip, "torch")


@contextmanager
def out_of_memory_is(row: Row, *columns: str) -> Iterator[None]:
    """Leave columns empty, and say so, where a comparison does not fit the device."""
    try:
        yield
    except torch.OutOfMemoryError:
        print(f"out of memory: {', '.join(columns)}")
        row.update(dict.fromkeys(columns))
        torch.cuda.empty_cache()


def measure(name: str, shape: Shape, options: argparse.Namespace, bandwidth: float) -> Row:
    """Check one shape on fresh inputs, then time it."""
    device, dtype = options.device, getattr(torch, options.dtype)
    arguments = {"precision": options.precision, "direction": options.direction}
    row: Row = {"shape": name, **shape._asdict(), "state": options.state, "direction": options.direction}
    check = draw_clip(shape, dtype, device, seed=options.seed, has_state=options.state)
    with out_of_memory_is(row, "error_output", "error_gradient"):
        found = errors(check, draw_gradient(check, options.seed + 1), options.impl, **arguments)
        row["error_output"] = found.pop("output")
        row["error_gradient"] = max(found.values())
        row["errors"] = found
    del check
    clip = draw_clip(shape, dtype, device, seed=options.seed + 2, has_state=options.state)
    doutput = draw_gradient(clip, options.seed + 3)
    forward_bytes, backward_bytes = (f(dtype.itemsize) for f in (shape.forward_bytes, shape.backward_bytes))
    row["floor_fwd"] = 1e3 * forward_bytes / bandwidth
    row["floor_train"] = 1e3 * (forward_bytes + backward_bytes) / bandwidth
    infer, train = steps(clip, doutput, lambda: mix(clip, options.impl, **arguments))
    for column, call in (("fwd", infer), ("train", train)):
        row[f"eager_{column}"] = milliseconds(call, device, options.repeats)
    row["peak"] = peak_megabytes(train, device)
    for column, call in (("fwd", infer), ("train", train)):
        graph = captured(call) if device == "cuda" else None
        row[f"graph_{column}"] = None if graph is None else milliseconds(graph.replay, device, options.repeats)
        del graph
    for other in options.compare:
        for column, call in zip(("fwd", "train"), steps(clip, doutput, contender(other, clip)), strict=True):
            with out_of_memory_is(row, f"{other}:{column}"):
                row[f"{other}:{column}"] = milliseconds(call, device, options.repeats)
    return row


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return the rows as text."""

    def cell(value: Any, column: str) -> str:
        if value is None:
            return "-"
        return f"{value:.1e}" if column.startswith("error") else f"{value:.0f}" if column == "peak" else f"{value:.3f}"

    lines = [["shape", *columns]] + [[row["shape"], *(cell(row.get(c), c) for c in columns)] for row in rows]
    return aligned(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw time against the floor and memory over the number of tokens."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = sorted(rows, key=lambda row: row["frames"] * row["spatial"] * row["batch"])
    tokens = [row["frames"] * row["spatial"] * row["batch"] for row in rows]
    figure, (times, memory) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    present = sorted({key for row in rows for key in row if key.split(":")[-1].split("_")[-1] in ("fwd", "train")})
    for column in present:
        style = "k--" if column == "floor_train" else "k:" if column == "floor_fwd" else "o-"
        times.plot(tokens, [row.get(column) or float("nan") for row in rows], style, label=column)
    times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title="time, and the bytes that must move")
    times.legend(fontsize="small")
    memory.plot(tokens, [row["peak"] or float("nan") for row in rows], "o-")
    memory.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MB", title="peak of a training step beyond inputs")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--precision", default=None, choices=("bf16", "tf32", "ieee"))
    parser.add_argument("--direction", default="bidirectional", choices=("forward", "reverse", "bidirectional"))
    parser.add_argument("--state", action="store_true", help="a state goes in and comes out, as in a streaming step")
    parser.add_argument("--impl", default="auto", choices=("auto", "torch", "triton"))
    parser.add_argument("--compare", nargs="*", default=[], choices=COMPARISONS)
    parser.add_argument("--repeats", type=int, default=20, help="runs on the CPU; five milliseconds of runs on a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    return parse_shapes(parser, arguments, SHAPES, HEADLINE)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure the shapes, print the table, write what was asked for, and return the rows."""
    options = parse(arguments)
    bandwidth = copy_bandwidth(options.device, options.repeats)
    about = {**environment(options.device), "gdn_kernels": gdn_kernels.__version__, "copy_bandwidth": bandwidth}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    rows = []
    for name in options.shapes:
        rows.append(measure(name, SHAPES[name], options, bandwidth))
    columns = [*COLUMNS, *(f"{other}:{step}" for other in options.compare for step in ("fwd", "train"))]
    print(table(rows, columns))
    if options.json:
        options.json.write_text(json.dumps({"environment": about, "rows": rows}, indent=2))
    if options.png:
        draw(rows, options.png)
    return rows


if __name__ == "__main__":
    main()
