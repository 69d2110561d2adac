"""How a training step scales over ranks: per rank a fixed number of frames (or tokens), then a fixed number in total.

    python scaling.py                                   # every CUDA device, NCCL, the shapes that figures are for
    python scaling.py tiny --device cpu --ranks 2       # gloo, to see it work

Shapes of frames run `cp_frame_gdn` on every schedule, shapes of tokens the gated delta product, which only gathers.
Columns are milliseconds, medians. ``alone``: the local operation on as many frames as the busiest rank has. ``step``:
over the ranks. ``exchange``: the two exchanges of a step alone, forward and backward. ``exposed``: what of it is not
hidden, the step less the same step whose exchanges find their buffers there. ``efficiency``: alone / step.
``predicted``: the exchanges by the cost model, on the link as measured between the ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from delta_product import SHAPES as TOKEN_SHAPES
from delta_product import Shape as TokenShape
from delta_product import draw as draw_tokens
from delta_product import run as run_tokens
from torch import Tensor

from gdn_cp import CPContext, FramePartition, collectives, cp_frame_gdn
from gdn_cp.cost_model import SCHEDULES, Link, measure_link, message_bytes, predict
from gdn_cp.delta_product import choose_backend
from gdn_kernels import frame_gdn

sys.path.append(str(Path(__file__).parents[2] / "gdn-kernels" / "benchmarks"))  # what the runners share
from measuring import aligned, environment, parse_shapes, parser_of  # noqa: E402

Row = dict[str, Any]
COLUMNS = ("shape", "fixed", "schedule", "ranks", "alone", "step", "exchange", "exposed", "efficiency", "predicted")


class Shape(NamedTuple):
    """Frames per rank where they are fixed, and in total where those are; tokens of a frame, heads, channels."""

    per_rank: int
    total: int
    spatial: int
    heads: int
    width: int


FRAMES = {
    "wm_61": Shape(61, 121, 880, 20, 112),
    "wm_121": Shape(121, 242, 880, 20, 112),
    "tiny": Shape(3, 5, 4, 2, 16),
}
TOKENS = {"gdp_32768": TOKEN_SHAPES["gdp_32768"], "tiny_tokens": TOKEN_SHAPES["tiny"]}
SHAPES = (*FRAMES, *TOKENS)


def draw(count: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return qkv, beta and decay of some frames, leaves, and a gradient of the output."""
    generator = torch.Generator(device=device).manual_seed(count)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    length = count * shape.spatial
    leaves = [
        normal(1, length, 3, shape.heads, shape.width).to(dtype),
        torch.sigmoid(normal(1, shape.heads, count, shape.spatial) + 2),
        torch.sigmoid(normal(1, shape.heads, count) + 3),
    ]
    return [x.requires_grad_() for x in leaves], normal(1, length, shape.heads, shape.width).to(dtype)


def median(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a call that all ranks make together, of the slowest rank."""
    call()
    times = []
    for _ in range(repeats):
        dist.barrier()
        _wait_for(device)
        begin = time.perf_counter()
        call()
        _wait_for(device)
        times.append(1e3 * (time.perf_counter() - begin))
    slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Work(NamedTuple):
    """A rank's training step, the same alone, the bytes of its exchanges, and their time by the cost model."""

    step: Callable[[], Any]
    alone: Callable[[], Any]
    messages: tuple[int, ...]
    predicted: float


def frames(shape: Shape, fixed: str, context: CPContext, link: Link, device: torch.device, dtype: torch.dtype) -> Work:
    """Return the work of a rank that has frames of a clip."""
    size, schedule = context.size, context.schedule
    partition = FramePartition.even(shape.per_rank * size if fixed == "per rank" else shape.total, size)
    leaves, doutput = draw(partition.counts[context.rank], shape, device, dtype)
    busiest, dbusiest = draw(max(partition.counts), shape, device, dtype)
    options: dict[str, Any] = {"direction": "bidirectional", "k_scale": (shape.width * shape.spatial) ** -0.5}

    def step() -> Any:
        output = cp_frame_gdn(*leaves, context=context, partition=partition, **options).output
        return torch.autograd.grad(output, leaves, doutput)

    def alone() -> Any:
        return torch.autograd.grad(frame_gdn(*busiest, **options).output, busiest, dbusiest)

    transition, state = message_bytes(shape.width, shape.heads)
    predicted = sum(predict(schedule, size, sent, state, link, directions=2) for sent in (transition, 0))
    return Work(step, alone, (transition + 2 * state, 2 * state), 1e-3 * predicted)


def tokens(shape: TokenShape, context: CPContext, link: Link, device: torch.device, dtype: torch.dtype) -> Work:
    """Return the work of a rank that has tokens of a stream, as many as the others."""
    leaves, doutput = draw_tokens(shape, shape.tokens, device, dtype)
    backend = choose_backend("auto", leaves[0])

    def step() -> Any:
        return torch.autograd.grad(run_tokens(shape, leaves, backend, context), leaves, doutput)

    def alone() -> Any:
        return torch.autograd.grad(run_tokens(shape, leaves, backend), leaves, doutput)

    square, state = (4 * shape.value_heads * shape.width * n for n in (shape.width, shape.value_width))
    predicted = 2 * predict("all_gather", context.size, square, state, link, directions=1)
    return Work(step, alone, (square + state,) * 2, 1e-3 * predicted)


def measure(work: Work, context: CPContext, device: torch.device, repeats: int) -> Row:
    """Time a rank's work; every rank calls this."""
    gathers = context.schedule == "all_gather"
    buffers = [torch.zeros(n // 4, device=device) for n in work.messages]

    def exchanges() -> None:
        for buffer in buffers:
            collectives.all_gather(buffer, context, "benchmark")

    alone, step = median(work.alone, device, repeats), median(work.step, device, repeats)
    exchange = median(exchanges, device, repeats) if gathers else None
    with there_already():
        exposed = step - median(work.step, device, repeats)
    return {
        "schedule": context.schedule, "ranks": context.size, "alone": alone, "step": step, "exchange": exchange,
        "exposed": exposed, "efficiency": alone / step, "predicted": work.predicted,
    }  # fmt: skip


def rows_of(
    name: str, context: CPContext, link: Link, device: torch.device, dtype: torch.dtype, repeats: int
) -> Iterator[Row]:
    """Yield the rows of a shape; every rank calls this."""
    if name in TOKENS:
        gather = context.replace(schedule="all_gather")
        work = tokens(TOKENS[name], gather, link, device, dtype)
        yield {"shape": name, "fixed": "per rank", **measure(work, gather, device, repeats)}
        return
    for fixed in ("per rank", "total"):
        for schedule in SCHEDULES:
            scheduled = context.replace(schedule=schedule)
            work = frames(FRAMES[name], fixed, scheduled, link, device, dtype)
            yield {"shape": name, "fixed": fixed, **measure(work, scheduled, device, repeats)}


def there_already() -> Any:
    """Let exchanges find their buffers: what a rank would receive is what it sends, and nothing travels."""

    def gather(buffer: Tensor, context: CPContext, label: str, meanwhile: Callable[[], None] | None = None) -> Tensor:
        if meanwhile is not None:
            meanwhile()
        return buffer.reshape(1, -1).expand(context.size, -1)

    def swap(
        sends: Sequence[Any], receives: Sequence[tuple[int, int]], like: Tensor, context: CPContext, label: str,
        *, continued: bool = False, meanwhile: Callable[[], None] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        if meanwhile is not None:
            meanwhile()
        return [like.new_zeros(n) for _, n in receives]

    return mock.patch.multiple(collectives, all_gather=gather, swap=swap)


def _rank(rank: int, size: int, folder: str, options: argparse.Namespace) -> None:
    on_cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    context = CPContext(dist.group.WORLD)
    link = measure_link(context, device)
    dtype = getattr(torch, options.dtype)
    rows = [row for name in options.shapes for row in rows_of(name, context, link, device, dtype, options.repeats)]
    if rank == 0:
        torch.save((rows, dataclasses.asdict(link)), Path(folder) / "found")
    dist.barrier()
    dist.destroy_process_group()


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    lines = [list(COLUMNS)]
    for row in rows:
        values = [row[name] for name in COLUMNS]
        lines.append(["-" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v) for v in values])
    return aligned(lines)


def draw_chart(rows: Sequence[Row], path: Path) -> None:
    """Draw the efficiency of each shape and schedule."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    labels = [f"{row['shape']}\n{row['fixed']}\n{row['schedule']}" for row in rows]
    axes.bar(range(len(rows)), [row["efficiency"] for row in rows])
    axes.set_xticks(range(len(rows)), labels, fontsize=6)
    axes.set(ylabel="alone / step", title=f"{rows[0]['ranks']} ranks")
    axes.axhline(1.0, color="black", linewidth=0.5)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, SHAPES)
    parser.add_argument("--ranks", type=int, help="default: every CUDA device")
    parser.add_argument("--dtype", default=None, choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parse_shapes(parser, arguments, SHAPES, ("wm_61", "wm_121", "gdp_32768"))
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.ranks = options.ranks or torch.cuda.device_count()
    if options.ranks < 2 or (options.device == "cuda" and options.ranks > torch.cuda.device_count()):
        parser.error(f"needs two ranks or more, on CUDA a device each; got {options.ranks} on {options.device}")
    return options


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure, print the table, write what was asked for, and return the rows."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(options.ranks, folder, options), nprocs=options.ranks)
        rows, link = torch.load(Path(folder) / "found", weights_only=False)
    print(f"link: {link}\n{table(rows)}")
    if options.json:
        about = {**environment(options.device), "dtype": options.dtype, "link": link}
        options.json.write_text(json.dumps({"environment": about, "rows": rows}, indent=2))
    if options.png:
        draw_chart(rows, options.png)
    return rows


if __name__ == "__main__":
    main()
