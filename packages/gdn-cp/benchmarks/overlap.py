"""What a training step spends on exchanges, and what of it nothing hides, read from a trace of `torch.profiler`.

Every exchange lies in a range ``gdn_cp: <label>`` on the thread that starts it and waits for it. On a GPU what was
launched inside such a range, and whatever NCCL runs, is communication, every other kernel or copy is compute, and what
is *exposed* is the time in which the device does the first and none of the second. On the CPU a thread that is inside a
range does nothing else: what is exposed is the time inside ranges, and what gloo does meanwhile is hidden.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

STEP = "benchmark: step"
_EXCHANGE = "gdn_cp: "
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
Event = dict[str, Any]
Span = tuple[float, float]


class Spent(NamedTuple):
    """Milliseconds of a step: on exchanges, on those that nothing hides, and on everything else."""

    communication: float
    exposed: float
    compute: float


def union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans, in order, that cover the same time."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def within(spans: Iterable[Span], window: Span) -> list[Span]:
    """Return what of the spans lies in a window."""
    return [(max(begin, window[0]), min(end, window[1])) for begin, end in spans]


def total(spans: Iterable[Span]) -> float:
    """Return how much time spans cover."""
    return sum(end - begin for begin, end in union(spans))


def outside(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """Return how much time ``spans`` cover and ``others`` do not."""
    others = list(others)
    return total([*spans, *others]) - total(others)


def steps_of(events: Iterable[Event]) -> list[Spent]:
    """Return what each step of a trace spent, in order; ``events`` as in a Chrome trace, times in microseconds."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    notes = [event for event in whole if event.get("cat") == "user_annotation"]
    ranges = [event for event in notes if event["name"].startswith(_EXCHANGE)]
    on_device = [event for event in whole if event.get("cat") in _ON_DEVICE]
    launches = {_correlation(event): event for event in whole if event.get("cat") in _LAUNCHES}
    ours, others = [], []
    for event in on_device:
        (ours if _is_exchange(event, launches, ranges) else others).append(event)
    found = []
    for step in sorted(_span(event) for event in notes if event["name"] == STEP):
        if on_device:
            communication, compute = ([*within(map(_span, kind), step)] for kind in (ours, others))
            times = total(communication), outside(communication, compute), total(compute)
        else:
            waiting = within(map(_span, ranges), step)
            travelling = within((_span(event) for event in notes if event["name"].startswith("gloo:")), step)
            times = total([*waiting, *travelling]), total(waiting), step[1] - step[0] - total(waiting)
        found.append(Spent(*(1e-3 * time for time in times)))
    return found


def profiled(call: Callable[[], object], meet: Callable[[], None], device: torch.device, repeats: int) -> Spent:
    """Run a step under the profiler and return what it spent, medians.

    Every rank calls this; ``meet`` brings the ranks to the same point and waits for the device.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(repeats + 1):
            meet()
            with torch.profiler.record_function(STEP):
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        steps = steps_of(json.loads(path.read_text())["traceEvents"])
    if len(steps) != repeats + 1:
        raise RuntimeError(f"the trace must show {repeats + 1} steps, found {len(steps)}")
    return medians(steps[1:])  # the first finds the profiler not ready


def medians(steps: Sequence[Spent]) -> Spent:
    """Return the median of each time."""
    return Spent(*(statistics.median(times) for times in zip(*steps, strict=True)))


def _is_exchange(event: Event, launches: dict[Any, Event], ranges: Sequence[Event]) -> bool:
    if event["name"].lower().startswith("nccl"):
        return True
    launch = launches.get(_correlation(event))
    if launch is None:
        return False
    begin = launch["ts"]
    return any(r["tid"] == launch["tid"] and r["ts"] <= begin <= r["ts"] + r["dur"] for r in ranges)


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]
