"""What the demos share: training runs in processes, and the comparison of what they leave."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from tqdm import tqdm

from gdn_cp import CPContext, count_exchanges
from gdn_models import all_reduce_gradients

LIMIT_S = 900.0  # ranks that take longer have gone wrong
EXCHANGE_LIMIT = timedelta(seconds=120)
# Ranks round the same sums in another order. So they may differ ten times as much as a run on one process whose input
# was moved by one rounding; a drift counts as at least 16 roundings of fp32, and no proof allows more than two percent.
DRIFT_FACTOR = 10.0
DRIFT_FLOOR, DRIFT_CEILING = 16 * 2.0**-24, 2e-2


class Line(NamedTuple):
    """One comparison of the table."""

    what: str
    difference: float
    tolerance: float
    where: str = ""

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.difference <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Settings:
    """``nudge`` scales what the model reads: 1 + eps moves it by one rounding. ``sum_gradients`` off is a fault."""

    steps: int
    seed: int = 0
    nudge: float = 1.0
    sum_gradients: bool = True


@dataclasses.dataclass
class Run:
    """What a training run leaves, on the CPU.

    ``losses`` per step; ``output`` and ``gradients`` of the first step; ``weights`` and ``final`` output at the end;
    ``labels`` and ``sent`` of the exchanges of one step, bytes per rank; ``seconds``, on ``threads`` cores.
    """

    losses: list[float]
    output: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    final: Tensor
    seconds: float
    threads: int
    labels: list[str]
    sent: list[int]


def fit(
    model: nn.Module,
    settings: Settings,
    lr: float,
    context: CPContext | None,
    name: str,
    output_and_loss: Callable[[int], tuple[Tensor, Tensor]],
    final: Callable[[], Tensor],
) -> Run:
    """Train, the same way with and without ranks.

    ``output_and_loss(step)`` are those of this rank, whose losses add up; ``final()`` is the output at the end.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses: list[float] = []
    begin = time.monotonic()
    for step in tqdm(range(settings.steps), desc=name, disable=context is not None and context.rank > 0, leave=True):
        with count_exchanges() as exchanges:
            output, loss = output_and_loss(step)
            optimizer.zero_grad()
            loss.backward()
            if context is not None and settings.sum_gradients:
                all_reduce_gradients(model, context)
        if step == 0:
            first = output.detach().cpu(), {n: p.grad.detach().cpu().clone() for n, p in model.named_parameters()}
            labels, sent = list(exchanges.labels), list(exchanges.sent)
        for group in optimizer.param_groups:  # warm up, then down to nothing
            done = (step + 1) / settings.steps
            group["lr"] = lr * min(1.0, 10 * done) * (1 - 0.95 * done)
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        last = final().cpu()
    weights = {n: p.detach().cpu() for n, p in model.named_parameters()}
    seconds, threads = time.monotonic() - begin, torch.get_num_threads()
    return Run(losses, *first, weights, last, seconds, threads, labels, sent)


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm expected; inf where something is not finite."""
    if not expected.norm() > 0:
        return float(found.norm())
    difference = float((found.double() - expected.double()).norm() / expected.double().norm())
    return difference if math.isfinite(difference) else math.inf


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[str, float]:
    """Return the parameter that differs most, relative to the largest of its kind, and by how much."""
    scale = max(float(x.norm()) for x in expected.values())
    differences = {
        name: float((found[name].double() - x.double()).norm()) / max(float(x.norm()), 1e-3 * scale)
        for name, x in expected.items()
    }
    name = max(differences, key=lambda key: differences[key] if math.isfinite(differences[key]) else math.inf)
    return name, differences[name] if math.isfinite(differences[name]) else math.inf


def compare(one: Run, ranks: Run, nudged: Run) -> list[Line]:
    """Hold the run on ranks to the one on one process; the nudged run says how far rounding alone drifts."""
    found, drift = differences(ranks, one), differences(nudged, one)
    return [
        Line(what, found[what][1], min(DRIFT_CEILING, DRIFT_FACTOR * max(DRIFT_FLOOR, drift[what][1])), found[what][0])
        for what in found
    ]


def differences(run: Run, one: Run) -> dict[str, tuple[str, float]]:
    """Return, for what a run leaves, which part of it differs most from the run on one process, and by how much."""
    return {
        "output of the first step": ("", relative(run.output, one.output)),
        "gradients of the first step": worst(run.gradients, one.gradients),
        "final weights": worst(run.weights, one.weights),
        "final output": ("", relative(run.final, one.final)),
        "losses": ("", relative(torch.tensor(run.losses), torch.tensor(one.losses))),
    }


def table(title: str, one: Run, ranks: Run, size: int, lines: Sequence[Line], more: Sequence[str]) -> str:
    """Return the text of the report; ``more``: lines that belong to one demo."""
    steps = len(one.losses)
    shown = sorted({*range(0, steps, max(1, steps // 8)), steps - 1})
    text = [title, "", "  step   one process   ranks"]
    text += [f"  {i:4d}   {one.losses[i]:11.6f}   {ranks.losses[i]:11.6f}" for i in shown]
    text += [
        "",
        *more,
        f"  time   {one.seconds:.1f} s (one process, {one.threads} cores), "
        f"{ranks.seconds:.1f} s ({size} ranks, cores of each: {ranks.threads})",
        "",
        "  exchange of one step, per rank              number    bytes each",
    ]
    for label in dict.fromkeys(ranks.labels):
        sent = [n for name, n in zip(ranks.labels, ranks.sent, strict=True) if name == label]
        text.append(f"  {label:42s}  {len(sent):6d}  {max(sent):12,d}")
    text += ["", "  largest relative difference", ""]
    for line in lines:
        what = f"{line.what} (worst: {line.where})" if line.where else line.what
        text.append(f"  {what:72s} {line.difference:9.2e}  <= {line.tolerance:.1e}  {'yes' if line.holds else 'NO'}")
    text += [
        "",
        f"  A tolerance is {DRIFT_FACTOR:g} times the drift of a third run, on one process, whose input was moved by",
        f"  one rounding; a drift counts as {DRIFT_FLOOR:.0e} at least.",
    ]
    return "\n".join(text)


def at_least_one(text: str) -> int:
    """Parse a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def parser_of(doc: str | None, shared: str, steps: int, picture: str) -> argparse.ArgumentParser:
    """Return a parser of what every demo takes; ``shared`` is what the ranks divide."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=at_least_one, help=f"processes that share the {shared} (default: GPUs, or 2)")
    parser.add_argument("--steps", type=at_least_one, default=steps, help="training steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo-out") / picture, help="the picture (%(default)s)")
    parser.add_argument("--break-it", action="store_true", help="leave out a sum over ranks, to see the proof fail")
    return parser


class Place(NamedTuple):
    """How many ranks there are, whether each has a GPU, and where one process runs."""

    size: int
    on_cuda: bool
    device: torch.device

    def __str__(self) -> str:
        """Return it as text for a title."""
        return f"{self.size} ranks over {'NCCL, a GPU each' if self.on_cuda else 'gloo on the CPU'}"


def place_of(ranks: int | None) -> Place:
    """Return the place of a demo: GPUs where there are two or more, and enough of them."""
    devices = torch.cuda.device_count()
    size = ranks or max(2, devices)
    on_cuda = devices >= 2 and size <= devices
    return Place(size, on_cuda, torch.device("cuda", 0) if on_cuda else torch.device("cpu"))


def prove(
    train: Callable[..., Run], data: Any, options: argparse.Namespace, place: Place, rounding: float
) -> tuple[Run, Run, Run]:
    """Train on one process, on ranks, and on one process again whose input is moved by one ``rounding``."""
    share_cores(1)
    one = train(data, Settings(options.steps), place.device, None, "one process")
    nudged = Settings(options.steps, nudge=1 + rounding)
    drifted = train(data, nudged, place.device, None, "one rounding away")
    ranks = on_ranks(
        place.size, place.on_cuda, train, data, Settings(options.steps, sum_gradients=not options.break_it)
    )
    return one, ranks, drifted


def draw_losses(axes: Any, one: Run, ranks: Run, size: int, **labels: Any) -> None:
    """Draw both loss curves, one on top of the other; ``labels`` go to the axes."""
    axes.plot(one.losses, color="tab:blue", linewidth=4, alpha=0.4, label="one process")
    axes.plot(ranks.losses, color="black", linewidth=1, linestyle="--", label=f"{size} ranks")
    axes.set(xlabel="step", **labels)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def conclude(picture: Path, agree: bool) -> int:
    """Say how the proof ended and return the exit status."""
    print(f"picture: {picture}\n{'one process and ranks agree' if agree else 'one process and ranks DISAGREE'}")
    return 0 if agree else 1


def share_cores(processes: int) -> int:
    """Give this process its share of the cores, at most half: waiting for a busy one costs more. Return how many."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(2, processes)))
    return torch.get_num_threads()


def on_ranks(size: int, on_cuda: bool, train: Callable[..., Run], *arguments: Any) -> Run:
    """Run ``train(*arguments, device, context, name)`` in ``size`` processes of one group and put the parts together.

    Outputs are joined along dim 1 in the order of ranks, losses summed; the rest is that of rank 0.

    Raises:
        RuntimeError: The ranks did not finish in time; a rank's own error comes with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save((train, arguments), Path(folder) / "job")
        ranks = mp.spawn(_rank, args=(size, folder, on_cuda), nprocs=size, join=False)
        deadline = time.monotonic() + LIMIT_S
        while not ranks.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise RuntimeError(f"the ranks did not finish within {LIMIT_S:.0f} s")
        runs = [torch.load(Path(folder) / f"{rank}", weights_only=False) for rank in range(size)]
    whole: Run = runs[0]
    whole.losses = [sum(parts) for parts in zip(*(run.losses for run in runs), strict=True)]
    whole.output = torch.cat([run.output for run in runs], 1)
    whole.final = torch.cat([run.final for run in runs], 1)
    return whole


def _rank(rank: int, size: int, folder: str, on_cuda: bool) -> None:
    share_cores(size)
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size,
        timeout=EXCHANGE_LIMIT,
    )  # fmt: skip
    train, arguments = torch.load(Path(folder) / "job", weights_only=False)
    run = train(*arguments, device, CPContext(dist.group.WORLD, tag="demo"), f"{size} ranks")
    torch.save(run, Path(folder) / f"{rank}")
    dist.barrier()
    dist.destroy_process_group()


def require_writable(path: Path) -> None:
    """Raise OSError now, rather than after the training, if ``path`` cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab"):
        pass
