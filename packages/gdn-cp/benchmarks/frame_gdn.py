"""What context parallelism costs on one device: a one-rank group, one rank's work of four, and the published scan.

    python frame_gdn.py                                 # a CUDA device, bf16, the shapes that figures are quoted for
    python frame_gdn.py tiny --device cpu --dtype float32 --json costs.json

Times are medians in milliseconds. ``eager`` is a call from Python, ``graph`` the replay of a captured CUDA graph. Every
part is checked against the local operation, in the same run, before it is timed. The exchange itself is left out:
buffers of the other ranks are there already, and this rank writes into its slot.

``part_*`` are the parts of the rank's step, each timed alone (a CUDA graph on a GPU): ``begin`` is all before the
exchange and holds ``summary``, ``folds`` what turns the gathered buffers into entry states, ``finish`` the rest and
holds the seeded ``scan``; ``back_*`` are their twins in the backward, ``back_sweep`` that of the scan. ``overlap`` is
done while an exchange travels. ``launches_*`` counts kernels and copies of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gdn_cp import CPContext, FramePartition, cp_frame_gdn, cp_frame_gdn_scan, passes, schedules
from gdn_cp.cost_model import as_link
from gdn_cp.frame_gdn import make_plan
from gdn_cp.schedules import Entered
from gdn_cp.schedules.rounds import Steps
from gdn_kernels import RotaryTables, frame_gdn, rotary_tables
from gdn_kernels.frame_gdn import stages
from gdn_kernels.frame_gdn.op import frame_gdn_arguments
from gdn_kernels.types import FrameBoundary, FrameInputs, Impl

sys.path.append(str(Path(__file__).parents[2] / "gdn-kernels" / "benchmarks"))  # what the runners share
from measuring import aligned, captured, environment, parse_shapes, parser_of  # noqa: E402

RANKS, OWN = 4, 1  # one rank in the middle of four
Row = dict[str, Any]
T = TypeVar("T")


class Shape(NamedTuple):
    """Frames of one rank, tokens of a frame, heads, channels."""

    frames: int
    spatial: int
    heads: int
    width: int


SHAPES = {
    "tune_11": Shape(11, 920, 20, 112),
    "wm_31": Shape(31, 880, 20, 112),
    "tiny": Shape(3, 4, 2, 16),
}


class Clip(NamedTuple):
    """Arguments of the operation; the first five are leaves."""

    qkv: Tensor
    beta: Tensor
    decay: Tensor
    q_norm_weight: Tensor
    k_norm_weight: Tensor
    rope: RotaryTables
    k_scale: float

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments."""
        return {
            "rope": self.rope, "q_norm_weight": self.q_norm_weight, "k_norm_weight": self.k_norm_weight,
            "k_scale": self.k_scale, "direction": "bidirectional",
        }  # fmt: skip


def draw(shape: Shape, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Clip, Tensor]:
    """Return the frames of one rank, and a gradient of their output."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    frames, spatial, heads, width = shape
    tokens = frames * spatial
    leaves = (
        normal(1, tokens, 3, heads, width).to(dtype), torch.sigmoid(normal(1, heads, frames, spatial) + 2),
        torch.sigmoid(normal(1, heads, frames) + 3), 1 + 0.2 * normal(heads * width), 1 + 0.2 * normal(heads * width),
    )  # fmt: skip
    rope = rotary_tables((frames, spatial, 1), width, device=torch.device(device))
    clip = Clip(*(x.requires_grad_() for x in leaves), rope, (width * spatial) ** -0.5)
    return clip, normal(1, tokens, heads, width).to(dtype)


def local_steps(clip: Clip, doutput: Tensor, context: CPContext | None) -> dict[str, Callable[[], Any]]:
    """Return a forward and a training step of the operation, here or over the ranks of a context."""

    def forward() -> Tensor:
        if context is None:
            return frame_gdn(*clip[:3], **clip.options()).output
        return cp_frame_gdn(*clip[:3], context=context, **clip.options()).output

    def infer() -> Tensor:
        with torch.no_grad():
            return forward()

    return {"fwd": infer, "train": lambda: torch.autograd.grad(forward(), clip[:5], doutput)}


class OneRank:
    """The work of one rank of four, with the frames of the others equal to its own and their buffers at hand."""

    def __init__(self, clip: Clip, doutput: Tensor) -> None:
        given = [x.detach() if isinstance(x, Tensor) else x for x in clip[:5]]
        options = {**clip.options(), "q_norm_weight": given[3], "k_norm_weight": given[4]}
        defaults: dict[str, Any] = dict(
            chunk_starts=None, frame_valid=None, initial_state=None, output_final_state=False, norm_eps=1e-5, eps=1e-6,
            precision=None, impl="auto", divide=True,
        )  # fmt: skip
        self.inputs, self.options, initial = frame_gdn_arguments(*given[:3], **options, **defaults)
        counts = (self.inputs.beta.shape[2],) * RANKS
        self.plan = make_plan(
            self.inputs, self.options, initial, OWN, RANKS, FramePartition(counts), None, False, True, "all_gather",
            as_link("nvlink"),
        )  # fmt: skip
        self.options, self.doutput = self.plan.options, doutput
        self.needs = [x is not None and x.is_floating_point() for x in self.inputs[:8]] + [False] * 3
        _, own = passes.begin(self.plan, self.inputs, (None, None))
        self.gathered = own.repeat(RANKS, 1)
        self.forward_bytes = own.numel() * own.element_size()
        _, back = self._begin_backward(*self.forward()[1:], None)
        self.gathered_back = back.repeat(RANKS, 1)
        self.backward_bytes = back.numel() * back.element_size()

    def _begin(self) -> stages.Run:
        return passes.begin(self.plan, self.inputs, (None, None), self.gathered[OWN])[0]

    def _enter(self) -> Entered:
        return arrive(schedules.enter(self.plan, self.gathered[OWN], (None, None)), self.gathered)

    def _begin_backward(
        self, entry: FrameBoundary, kept: Tensor, saved: tuple[Tensor | None, ...], own: Tensor | None
    ) -> tuple[stages.Adjoint, Tensor]:
        dresults = (self.doutput, None)
        return passes.begin_backward(self.plan, self.inputs, entry, dresults, saved, (None, None), kept, own)

    def _leave(self, kept: Tensor) -> FrameBoundary:
        return arrive(schedules.leave(self.plan, self.gathered_back[OWN], kept), self.gathered_back).exits

    def forward(self) -> tuple[Tensor, FrameBoundary, Tensor, tuple[Tensor | None, ...]]:
        """Summary, own slot of the buffer, fold, seeded scan and read-out."""
        run = self._begin()
        run.overlap()
        entry, _, kept = self._enter()
        result, _, saved = run.finish(entry)
        return result, entry, kept, saved

    def train(self) -> FrameInputs:
        """The forward, and both halves of the backward."""
        _, entry, kept, saved = self.forward()
        adjoint, _ = self._begin_backward(entry, kept, saved, self.gathered_back[OWN])
        adjoint.overlap()
        return adjoint.finish(self._leave(kept), self.needs)

    def parts(self) -> dict[str, Callable[[], Any]]:
        """Return the parts of a step, each of which can be run again and again."""
        run = self._begin()
        run.overlap()
        entry, _, kept = self._enter()
        _, _, saved = run.finish(entry)
        own = self.gathered_back[OWN]
        adjoint, _ = self._begin_backward(entry, kept, saved, own)
        adjoint.overlap()
        exits = self._leave(kept)
        found: dict[str, Callable[[], Any]] = {
            "begin": self._begin, "folds": self._enter, "finish": lambda: run.finish(entry),
            "back_begin": lambda: self._begin_backward(entry, kept, saved, own)[0],
            "back_folds": lambda: self._leave(kept), "back_finish": lambda: adjoint.finish(exits, self.needs),
        }  # fmt: skip
        return found | (self._kernels(entry, exits, saved) if self.options.impl is Impl.TRITON else {})

    def _kernels(
        self, entry: FrameBoundary, exits: FrameBoundary, saved: tuple[Tensor | None, ...]
    ) -> dict[str, Callable[[], Any]]:
        """Return the launches inside the parts that are the rank's own, the scans, and what overlaps the exchange."""
        from gdn_kernels.frame_gdn import triton_stages as triton

        prepared = triton.prepare(self.inputs, self.options)
        _, _, transitions = triton.write(prepared)
        kept = triton.Saved(*saved[2:])
        call, q, *_, decay = prepared
        flags = self.options.direction, self.options.resets
        c, cz = (torch.zeros_like(x[:, :, 1:]) for x in (kept.forward_kv, kept.forward_z))
        sweep = (call, kept.transitions(), decay, *flags, kept.histories(), c, cz)
        return {
            "summary": lambda: triton.summary(call, transitions, decay, *flags),
            "scan": lambda: triton.phase_b(call, transitions, decay, *flags, entry),
            "overlap": lambda: triton.rms_statistic(q, call.norm_eps),
            "back_summary": lambda: triton.adjoint_summary(call, kept.transitions(), decay, *flags, c, cz),
            "back_sweep": lambda: triton.phase_b_bwd(*sweep, exits),
        }

    def steps(self) -> dict[str, Callable[[], Any]]:
        """Return a forward and a training step."""
        return {"fwd": lambda: self.forward()[0], "train": self.train}


def arrive(steps: Steps[T], gathered: Tensor) -> T:
    """Run the schedule of one gather on a buffer that is there already."""
    next(steps)
    try:
        steps.send(gathered)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("an all-gather is one round")


def published_scan(transitions: Tensor, increments: Tensor) -> Tensor:
    """The published algorithm on one rank, from its description: scan, all cumulative products, additive correction."""
    state, product = torch.zeros_like(increments[:, 0]), None
    states, products = [], []
    for t in range(transitions.shape[1]):
        state = state @ transitions[:, t] + increments[:, t]
        product = transitions[:, t] if product is None else product @ transitions[:, t]
        states.append(state)
        products.append(product)
    entry = torch.zeros_like(state)  # what the ranks before would hand over
    return torch.stack(states, 1) + entry[:, None] @ torch.stack(products, 1)


def scan_steps(shape: Shape, device: str) -> dict[str, Callable[[], Any]]:
    """Return the published scan of both streams, and ours with the published arguments, on given transitions."""
    generator = torch.Generator(device=device).manual_seed(5)
    size = (shape.heads, shape.frames, shape.width, shape.width)
    noise = torch.randn(3, *size, generator=generator, device=device)
    w_kv, w_z = (0.9 * torch.eye(shape.width, device=device) - 0.02 * x for x in noise[:2])
    leaves = [x.detach().requires_grad_() for x in (w_kv, noise[2], w_z, noise[2][..., 0])]
    context = CPContext.single()

    def theirs() -> tuple[Tensor, Tensor]:
        kv = published_scan(leaves[0], leaves[1])
        z = published_scan(leaves[2].mT, leaves[3][:, :, None])
        return kv, z[:, :, 0]

    def ours() -> tuple[Tensor, Tensor]:
        kv, z = cp_frame_gdn_scan(*leaves, context)
        return kv, z

    def step(call: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad([x.sum() for x in call()], leaves)

    check("scan", ours(), theirs(), 1e-4)
    return {"published": theirs, "published_train": step(theirs), "ours": ours, "ours_train": step(ours)}


def check(name: str, found: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float) -> float:
    """Return the largest relative Frobenius difference; leave with a message if it is above the tolerance."""
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        if x is None or y is None:
            continue
        exact = y.detach().double()
        difference = float((x.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))
        if not difference <= tolerance:  # also what is not a number
            sys.exit(f"{name} differs by {difference:.1e}, more than {tolerance:.0e}: nothing is timed")
        worst = max(worst, difference)
    return worst


def milliseconds(calls: dict[str, Callable[[], Any]], device: str, repeats: int) -> dict[str, float]:
    """Return the median time of each call; the calls take turns, so that they see the same clocks."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            if device == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                begin.record()
                call()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end))
            else:
                start = time.perf_counter()
                call()
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(name: str, options: argparse.Namespace) -> Row:
    """Check and time one shape."""
    shape, device, dtype = SHAPES[name], options.device, getattr(torch, options.dtype)
    row: Row = {"shape": name, **shape._asdict(), "ranks": RANKS}
    clip, doutput = draw(shape, device, dtype)
    single, rank = CPContext.single(), OneRank(clip, doutput)
    local, group, one = local_steps(clip, doutput, None), local_steps(clip, doutput, single), rank.steps()
    check("a one-rank group", [group["fwd"]()], [local["fwd"]()], 0.0)
    row["error"] = check_one_rank(rank, clip)
    row["forward_bytes"], row["backward_bytes"] = rank.forward_bytes, rank.backward_bytes
    if device == "cuda":
        waits_for_nothing(rank.train)
    for step in ("fwd", "train"):
        calls = {"local": local[step], "group": group[step], "rank": one[step]}
        ways = {"eager": calls}
        if device == "cuda":
            ways["graph"] = {key: captured(call).replay for key, call in calls.items()}
        for way, timed in ways.items():
            times = milliseconds(timed, device, options.repeats)
            row.update({f"{way}_{key}_{step}": value for key, value in times.items()})
            for key in ("group", "rank"):
                row[f"{way}_{key}_{step}_ratio"] = times[key] / times["local"]
    parts = rank.parts()
    if device == "cuda":
        row.update({f"launches_{key}_{step}": launches(call[step]) for step in ("fwd", "train")
                    for key, call in (("local", local), ("rank", one))})  # fmt: skip
        parts = {key: captured(call).replay for key, call in parts.items()}
    row.update({f"part_{key}": value for key, value in milliseconds(parts, device, options.repeats).items()})
    scans = milliseconds(scan_steps(shape, device), device, max(3, options.repeats // 5))
    row.update({f"scan_{key}": value for key, value in scans.items()})
    return row


def check_one_rank(rank: OneRank, clip: Clip) -> float:
    """Hold the rank's output to the second quarter of a clip that repeats its frames four times."""
    tokens = clip.qkv.shape[1]
    repeated = frame_gdn(
        clip.qkv.detach().repeat(1, RANKS, 1, 1, 1), clip.beta.detach().repeat(1, 1, RANKS, 1),
        clip.decay.detach().repeat(1, 1, RANKS),
        **{**clip.options(), "rope": RotaryTables(*(x.repeat(RANKS, 1) for x in clip.rope)),
           "q_norm_weight": clip.q_norm_weight.detach(), "k_norm_weight": clip.k_norm_weight.detach()},
    ).output  # fmt: skip
    # two ways to the same state, each of which rounds operands once: the precision of the operands, or of the output
    tolerance = 8e-3 if clip.qkv.dtype.itemsize == 2 else 1e-4
    return check("one rank of four", [rank.forward()[0]], [repeated[:, OWN * tokens : (OWN + 1) * tokens]], tolerance)


def waits_for_nothing(call: Callable[[], Any]) -> None:
    """Raise if the call waits for the device on the host once everything is compiled."""
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launches(call: Callable[[], Any]) -> int:
    """Return how many kernels and copies a call puts on the device."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or ())


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, one column per shape."""
    names = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "shape"]
    lines = [["", *(row["shape"] for row in rows)]]
    for name in names:
        values = [row.get(name) for row in rows]
        lines.append([name, *(f"{v:.3g}" if isinstance(v, float) else "" if v is None else f"{v:,}" for v in values)])
    return aligned(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    return parse_shapes(parser, arguments, SHAPES, ("tune_11", "wm_31"))


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure the shapes, print the table, write what was asked for, and return the rows."""
    options = parse(arguments)
    rows = [measure(name, options) for name in options.shapes]
    print(table(rows))
    if options.json:
        about = {**environment(options.device), "dtype": options.dtype}
        options.json.write_text(json.dumps({"environment": about, "rows": rows}, indent=2))
    return rows


if __name__ == "__main__":
    main()
