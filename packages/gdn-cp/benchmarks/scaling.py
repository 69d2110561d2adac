"""How a training step scales over ranks: with a fixed number of frames (or tokens) per rank, and in total.

    python scaling.py                                   # 2, 4, ... CUDA devices, NCCL, the shapes figures are for
    python scaling.py wm_61 --ranks 8 --json scaling.json --png scaling.png
    python scaling.py tiny --device cpu --ranks 2       # gloo, to see it work; on one GPU: --one-device --ranks 2

Shapes of frames run `cp_frame_gdn`, shapes of tokens the gated delta product, each on every schedule. Output and
gradients are held to one device first, in the same run: nothing is timed if they are wrong. ``--json`` is written after
every configuration, so that a run that ends early leaves what it found.

Columns are milliseconds, of the slowest rank. ``alone``: one device with the frames of a rank where those are fixed,
with all of them where the total is. ``share``: one device with the frames of the busiest rank. ``step``: over the
ranks, medians of calls from Python. ``compute``, ``communication``, ``exposed``: of such a step by the profiler, the
last what no other kernel hides (`overlap.py`). ``exchange``: the exchanges of a step without its local work, folds and
compositions included, and ``predicted`` those by the cost model, on the link and with the folds as measured between
these ranks. ``efficiency``: alone / step where a rank's frames are fixed, alone / (ranks * step) where the total is.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import overlap
import torch
import torch._inductor  # noqa: F401  the profiler asks for it: once, before ranks are forked
import torch.distributed as dist
import torch.multiprocessing as mp
from delta_product import SHAPES as TOKEN_SHAPES
from delta_product import Shape as TokenShape
from delta_product import draw as draw_tokens
from delta_product import run as run_tokens
from torch import Tensor

from gdn_cp import CPContext, FramePartition, affine, chunkwise, count_exchanges, cp_frame_gdn, schedules
from gdn_cp.affine import AffineMap
from gdn_cp.cost_model import SCHEDULES, Link, measure_link, measure_maps, message_bytes, predict
from gdn_cp.delta_product import choose_backend
from gdn_cp.frame_gdn import plan_over
from gdn_kernels import frame_gdn
from gdn_kernels.frame_gdn.op import frame_gdn_arguments

sys.path.append(str(Path(__file__).parents[2] / "gdn-kernels" / "benchmarks"))  # what the runners share
from measuring import aligned, environment, parse_shapes, parser_of  # noqa: E402

Row = dict[str, Any]
COLUMNS = (
    "shape", "fixed", "schedule", "ranks", "backend", "alone", "share", "step", "compute", "communication", "exposed",
    "exchange", "predicted", "efficiency",
)  # fmt: skip
FIXED = ("per rank", "total")
STYLES = {"all_gather": ("C0", "o"), "chain": ("C1", "s"), "doubling": ("C2", "^")}


class Shape(NamedTuple):
    """Frames of a rank or of all, tokens of a frame, those of the check where each rank has its own; heads, D."""

    frames: int
    spatial: int
    checked: int
    heads: int
    width: int


FRAMES = {
    "wm_61": Shape(61, 880, 64, 20, 112),
    "wm_121": Shape(121, 880, 64, 20, 112),
    "tiny": Shape(5, 4, 3, 2, 16),
}
TOKENS = {"gdp_32768": TOKEN_SHAPES["gdp_32768"], "tiny_tokens": TOKEN_SHAPES["tiny"]}
SHAPES = (*FRAMES, *TOKENS)
# Relative Frobenius between ranks and one device, either of which rounds operands: outputs, gradients, those of gates
TOLERANCES = {torch.bfloat16: (1e-2, 2e-2, 4e-2), torch.float32: (1e-4, 1e-3, 1e-3)}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a rank measures with."""

    context: CPContext
    device: torch.device
    dtype: torch.dtype
    repeats: int

    def meet(self) -> None:
        """Wait for all ranks, and for the device."""
        dist.barrier(**({"device_ids": [self.device.index]} if dist.get_backend() == "nccl" else {}))
        self.wait()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def of_ranks(self, value: float) -> list[float]:
        """Return a number of every rank."""
        own = torch.tensor([value], dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.context.size)]
        dist.all_gather(found, own)
        return torch.cat(found).tolist()

    def median(self, call: Callable[[], object]) -> float:
        """Return the median time of a call that all ranks make together, of the slowest rank."""
        call()
        times = []
        for _ in range(self.repeats):
            self.meet()
            begin = time.perf_counter()
            call()
            self.wait()
            times.append(1e3 * (time.perf_counter() - begin))
        return max(self.of_ranks(statistics.median(times)))


class Work(NamedTuple):
    """A rank's training step, the same on one device, the exchanges alone, and what they are predicted to take."""

    counts: tuple[int, ...]
    backend: str
    step: Callable[[], Any]
    alone: Callable[[], Any]
    share: Callable[[], Any]
    exchanges: Callable[[], Any]
    predicted: float
    check: Callable[[], dict[str, float]]


def draw(count: int, shape: Shape, setting: Setting, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Return qkv, beta and decay of some frames, and a gradient of the output."""
    generator = torch.Generator(device=setting.device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=setting.device)

    length = count * shape.spatial
    inputs = [
        normal(1, length, 3, shape.heads, shape.width).to(setting.dtype),
        torch.sigmoid(normal(1, shape.heads, count, shape.spatial) + 2),
        torch.sigmoid(normal(1, shape.heads, count) + 3),
    ]
    return inputs, normal(1, length, shape.heads, shape.width).to(setting.dtype)


def leaves_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs as contiguous leaves."""
    return [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in inputs]


def frames(shape: Shape, fixed: str, setting: Setting, link: Link) -> Work:
    """Return the work of a rank that has frames of a clip."""
    context, size = setting.context, setting.context.size
    partition = FramePartition.even(shape.frames * (size if fixed == "per rank" else 1), size)
    options: dict[str, Any] = {"direction": "bidirectional", "k_scale": (shape.width * shape.spatial) ** -0.5}

    def on_one(leaves: list[Tensor], doutput: Tensor) -> tuple[Tensor, ...]:
        output = frame_gdn(*leaves, **options).output
        return (output.detach(), *torch.autograd.grad(output, leaves, doutput))

    def on_ranks(leaves: list[Tensor], doutput: Tensor) -> tuple[Tensor, ...]:
        output = cp_frame_gdn(*leaves, context=context, partition=partition, **options).output
        return (output.detach(), *torch.autograd.grad(output, leaves, doutput))

    def check() -> dict[str, float]:
        checked = shape if fixed == "total" else shape._replace(spatial=shape.checked)
        inputs, doutput = draw(partition.total, checked, setting)
        span, cuts = partition.span(context.rank), [1, 1, 2, 2]  # dims of frames, or of their tokens
        lengths = [checked.spatial, checked.spatial, 1, 1]

        def own(x: Tensor, i: int) -> Tensor:
            return x.narrow(cuts[i], span.start * lengths[i], len(span) * lengths[i])

        expected = on_one(leaves_of(inputs), doutput)
        found = on_ranks(leaves_of([own(x, i + 1) for i, x in enumerate(inputs)]), own(doutput, 0))
        names = ("output", "qkv", "beta", "decay")
        return {name: error(found[i], own(expected[i], i)) for i, name in enumerate(names)}

    own_inputs, doutput = draw(partition.counts[context.rank], shape, setting, context.rank)
    leaves = leaves_of(own_inputs)
    others = {count: draw(count, shape, setting) for count in {shape.frames, max(partition.counts)}}

    def alone_on(count: int) -> Callable[[], Any]:
        inputs, upstream = others[count]
        given = leaves_of(inputs)
        return lambda: on_one(given, upstream)

    transition, state = message_bytes(shape.width, shape.heads)
    predicted = sum(
        predict(context.schedule, size, transition, state, link, directions=2, backward=x) for x in (False, True)
    )
    exchanges, backend = frame_exchanges(leaves, options, setting, partition)
    return Work(
        partition.counts, backend, lambda: on_ranks(leaves, doutput), alone_on(shape.frames),
        alone_on(max(partition.counts)), exchanges, 1e-3 * predicted, check,
    )  # fmt: skip


def frame_exchanges(
    leaves: list[Tensor], options: dict[str, Any], setting: Setting, partition: FramePartition
) -> tuple[Callable[[], Any], str]:
    """Return both exchanges of a step, of buffers that are there, and which kernels the step runs on."""
    defaults: dict[str, Any] = dict(
        rope=None, q_norm_weight=None, k_norm_weight=None, chunk_starts=None, frame_valid=None, initial_state=None,
        output_final_state=False, norm_eps=1e-5, eps=1e-6, precision=None, impl="auto", divide=True,
    )  # fmt: skip
    inputs, resolved, initial = frame_gdn_arguments(*(x.detach() for x in leaves), **defaults, **options)
    plan = plan_over(setting.context, inputs, resolved, initial, partition, None, False)
    sent, back = (
        layout.buffer(setting.device).zero_() for layout in (plan.forward_layout(), plan.backward_layout())
    )  # fmt: skip

    def exchanges() -> None:
        steps = schedules.enter(plan, sent, (None, None))
        kept = schedules.over_ranks(steps, setting.context, "exchange forward").kept
        schedules.over_ranks(schedules.leave(plan, back, kept), setting.context, "exchange backward")

    return exchanges, resolved.impl.value


class Summaries:
    """A backend of the chunkwise drivers without local work: summaries that are there, folded on arrival."""

    def __init__(self, square: Tensor, state: Tensor) -> None:
        self.own = torch.cat([state, square], -1)
        self.zero = torch.zeros_like(state)

    def cp_forward_prepare(self, inputs: Any) -> tuple[chunkwise.CPForwardPackedSummary, None]:
        return chunkwise.CPForwardPackedSummary(self.own), None

    def cp_forward_apply(self, local_context: Any, preceding_summaries: Any) -> tuple[Tensor, chunkwise.CPSavedContext]:
        return self._fold(preceding_summaries), chunkwise.CPSavedContext(())

    def cp_backward_prepare(self, output_grad: Any, saved_context: Any) -> tuple[Any, None]:
        return chunkwise.CPBackwardPackedSummary(self.own), None

    def cp_backward_apply(self, backward_context: Any, following_summaries: Any) -> Tensor:
        return self._fold(following_summaries)

    def _fold(self, summaries: Any) -> Tensor:
        width = self.zero.shape[-1]
        maps = [AffineMap(x[..., width:], x[..., :width]) for x in summaries.packed]
        return affine.fold(maps, self.zero)


def tokens(shape: TokenShape, fixed: str, setting: Setting, link: Link) -> Work:
    """Return the work of a rank that has tokens of a stream."""
    context, size, device, dtype = setting.context, setting.context.size, setting.device, setting.dtype
    one, steps = CPContext.single(), (1, shape.steps, shape.steps, 1, shape.steps)  # of q, k, v, g, beta per token
    backend = choose_backend("auto", draw_tokens(shape, 1, device, dtype)[0][0])
    counts = FramePartition.even(shape.tokens * (size if fixed == "per rank" else 1), size).counts

    def run(leaves: list[Tensor], doutput: Tensor, on: CPContext) -> tuple[Tensor, ...]:
        output = run_tokens(shape, leaves, backend, on)
        return (output.detach(), *torch.autograd.grad(output, leaves, doutput))

    def check() -> dict[str, float]:
        partition = FramePartition.even(shape.tokens if fixed == "total" else shape.checked * size, size)
        span = partition.span(context.rank)
        inputs, doutput = draw_tokens(shape, partition.total, device, dtype)

        def own(x: Tensor, n: int) -> Tensor:
            return x[:, span.start * n : span.stop * n]

        expected = run(leaves_of(inputs), doutput, one)
        found = run(leaves_of([own(x, n) for x, n in zip(inputs, steps, strict=True)]), own(doutput, 1), context)
        names = ("output", "q", "k", "v", "g", "beta")
        parts = zip(names, found, expected, (1, *steps), strict=True)
        return {name: error(x, own(y, n)) for name, x, y, n in parts}

    def stepping(count: int, on: CPContext) -> Callable[[], Any]:
        leaves, doutput = draw_tokens(shape, count, device, dtype)
        return lambda: run(leaves, doutput, on)

    square, state = (4 * shape.value_heads * shape.width * n for n in (shape.width, shape.value_width))
    of_maps = measure_maps(
        size, device, width=shape.width, heads=shape.value_heads, streams=1, directions=1, impl="torch",
        repeats=setting.repeats,
    )  # fmt: skip
    link = dataclasses.replace(link, **of_maps._asdict())
    predicted = 2 * predict(context.schedule, size, square, state, link, directions=1)  # every pass sends transitions
    summaries = Summaries(
        *(torch.zeros(1, shape.value_heads, shape.width, n, device=device) for n in (shape.width, shape.value_width))
    )

    def exchanges() -> None:
        rank = context.rank
        chunkwise.chunkwise_cp_forward(
            summaries, None, None, slice(0, rank), carries=rank > 0, context=context
        )  # fmt: skip
        chunkwise.chunkwise_cp_backward(
            summaries, None, chunkwise.CPSavedContext(()), None, slice(rank + 1, size), carries=rank < size - 1,
            context=context,
        )  # fmt: skip

    name = type(backend).__name__.removesuffix("GatedDeltaProductCPBackend").lower()
    return Work(
        counts, name, stepping(counts[context.rank], context), stepping(shape.tokens, one),
        stepping(max(counts), one), exchanges, 1e-3 * predicted, check,
    )  # fmt: skip


def error(found: Tensor, expected: Tensor) -> float:
    """Return the relative Frobenius difference; 0 of nothing."""
    exact = expected.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))


def checked(work: Work, setting: Setting) -> dict[str, float]:
    """Hold the step to one device, on every rank; return the largest errors. All ranks raise if one is wrong."""
    found = {name: max(setting.of_ranks(value)) for name, value in work.check().items()}
    for name, value in found.items():
        kind = 0 if name == "output" else 2 if name in ("beta", "decay", "g") else 1
        if not value <= TOLERANCES[setting.dtype][kind]:  # also what is not a number
            raise RuntimeError(
                f"{name} differs from one device by {value:.1e}, more than {TOLERANCES[setting.dtype][kind]:.0e}, on "
                f"{setting.context.size} ranks by {setting.context.schedule}: nothing is timed"
            )
    return found


def measure(work: Work, setting: Setting) -> Row:
    """Check and time a rank's work; every rank calls this."""
    errors = checked(work, setting)
    with count_exchanges() as seen:
        work.step()
    spent = overlap.profiled(work.step, setting.meet, setting.device, -(-setting.repeats // 4))
    of_ranks = {f"{name}_of_ranks": setting.of_ranks(value) for name, value in spent._asdict().items()}
    slowest = {name: max(of_ranks[f"{name}_of_ranks"]) for name in spent._fields}
    return {
        "counts": work.counts, "backend": work.backend, "errors": errors, "sent": seen.sent,
        "alone": setting.median(work.alone), "share": setting.median(work.share), "step": setting.median(work.step),
        "exchange": setting.median(work.exchanges), "predicted": work.predicted, **slowest, **of_ranks,
    }  # fmt: skip


def rows_of(name: str, wanted: Sequence[str], setting: Setting) -> Iterator[Row]:
    """Yield the rows of a shape; every rank calls this."""
    shape: Any = FRAMES.get(name) or TOKENS[name]
    width, heads = shape.width, shape.heads if name in FRAMES else shape.value_heads
    link = measure_link(setting.context, setting.device, width=width, heads=heads, repeats=setting.repeats)
    size = setting.context.size
    for fixed in FIXED:
        for schedule in wanted:
            context = setting.context.replace(schedule=schedule, link=link)
            scheduled = dataclasses.replace(setting, context=context)
            work = (frames if name in FRAMES else tokens)(shape, fixed, scheduled, link)
            found = measure(work, scheduled)
            efficiency = found["alone"] / found["step"] / (size if fixed == "total" else 1)
            yield {
                "shape": name, "fixed": fixed, "schedule": schedule, "ranks": size, "group": dist.get_backend(),
                **found, "efficiency": efficiency, "link": dataclasses.asdict(link),
            }  # fmt: skip


def write(path: Path, about: Row, rows: Sequence[Row]) -> None:
    """Write the file anew, so that a reader finds it whole."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps({"environment": about, "rows": rows}, indent=2))
    os.replace(unfinished, path)


def read(path: Path) -> tuple[Row, list[Row]]:
    """Return what was written."""
    found = json.loads(path.read_text())
    return found["environment"], found["rows"]


def _rank(rank: int, size: int, folder: str, path: Path, options: argparse.Namespace) -> None:
    on_cuda = options.device == "cuda"
    device = torch.device("cuda", 0 if options.one_device else rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_cuda and not options.one_device else "gloo",
        init_method=f"file://{folder}/meeting-{size}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=600),  # FLA tunes its kernels for minutes, on each rank for itself
    )  # fmt: skip
    setting = Setting(CPContext(dist.group.WORLD), device, getattr(torch, options.dtype), options.repeats)
    for name in options.shapes:
        for row in rows_of(name, options.schedules, setting):
            if rank == 0:
                about, rows = read(path)
                write(path, about, [*rows, row])
    dist.barrier()
    dist.destroy_process_group()


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    lines = [list(COLUMNS)]
    for row in rows:
        lines.append([f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS])
    return aligned(lines)


def draw_chart(rows: Sequence[Row], path: Path) -> None:
    """Draw against the number of ranks: times of a step and what of it is exposed, and the efficiency."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys((row["shape"], row["fixed"]) for row in rows))
    figure, panels = plt.subplots(len(cases), 2, figsize=(9, 3 * len(cases)), layout="constrained", squeeze=False)
    for (shape, fixed), (times, efficiency) in zip(cases, panels, strict=True):
        held = [row for row in rows if (row["shape"], row["fixed"]) == (shape, fixed)]
        for schedule, (colour, marker) in STYLES.items():
            own = [row for row in held if row["schedule"] == schedule]
            if not own:
                continue
            ranks = [row["ranks"] for row in own]
            lines = {"step": "-", "exposed": ":"}
            for name, style in lines.items():
                times.plot(
                    ranks, [row[name] for row in own], style, color=colour, marker=marker, markersize=4,
                    label=f"{schedule}, {name}",
                )  # fmt: skip
            efficiency.plot(ranks, [row["efficiency"] for row in own], color=colour, marker=marker, label=schedule)
        sizes = sorted({row["ranks"] for row in held})
        alone = statistics.median(row["alone"] for row in held)
        ideal = [alone / (size if fixed == "total" else 1) for size in sizes]
        times.plot(sizes, ideal, color="0.5", linewidth=0.8, label="one device" + ", shared" * (fixed == "total"))
        efficiency.axhline(1.0, color="0.5", linewidth=0.8)
        for panel in (times, efficiency):
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.set(xlabel="ranks", title=f"{shape}, fixed {fixed}")
        times.set(ylabel="milliseconds", yscale="log")
        efficiency.set(ylabel="efficiency", ylim=(0, None))
    panels[0][0].legend(frameon=False, fontsize=6)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, SHAPES)
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 2, 4, ... and every CUDA device")
    parser.add_argument(
        "--one-device", action="store_true", help="ranks share a CUDA device, over gloo: to see it work"
    )
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--dtype", default=None, choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parse_shapes(parser, arguments, SHAPES, ("wm_61", "wm_121", "gdp_32768"))
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    devices = torch.cuda.device_count()
    options.ranks = options.ranks or sorted(
        {2**n for n in range(1, devices.bit_length()) if 2**n <= devices} | {devices}
    )
    most = devices if options.device == "cuda" and not options.one_device else max(options.ranks)
    if not all(2 <= size <= most for size in options.ranks):
        parser.error(f"needs two ranks or more, on CUDA a device each; got {options.ranks} on {options.device}")
    return options


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure, print the table, write what was asked for, and return the rows."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or Path(folder) / "scaling.json"
        about = {**environment(options.device), "dtype": options.dtype, "repeats": options.repeats}
        if options.device == "cuda":
            about |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "devices": torch.cuda.device_count()}
        write(path, about, [])
        try:
            for size in options.ranks:
                # a rank without a GPU starts in a tenth of a second if it is forked
                method = "spawn" if options.device == "cuda" else "fork"
                given = (size, folder, path, options)
                mp.start_processes(_rank, args=given, nprocs=size, start_method=method)  # type: ignore[no-untyped-call]
        finally:
            rows = read(path)[1]
            print(table(rows))
            if options.png and rows:
                draw_chart(rows, options.png)
    return rows


if __name__ == "__main__":
    main()
