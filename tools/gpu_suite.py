"""Run the GPU tests and the benchmarks on a machine that has torch, Triton and pytest, but no nox.

    python tools/gpu_suite.py out                        # everything, results and logs under out/
    python tools/gpu_suite.py out --tests "cp and bfloat16" --no-benchmarks

Tests run first, a process for every few of them and a process per core at once, because compiling kernels takes longer
than running them; then, one at a time, the tests that need most of the GPU's memory, those over NCCL, which take all
devices, and the benchmarks. Exit status 1 if anything failed or ran out of time, if a process found no test to run, or
if no test was chosen at all.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gdn-kernels", "gdn-cp", "gdn-models")
SHARE = 5  # tests of one process: neighbours use the same kernels
MARKS = {"gpu": "gpu", "alone": "whole_gpu", "nccl": "nccl"}  # kinds of tests; only those of the first run side by side
_TEST = "gpu-suite-test: "
LAST_WORDS = 10.0  # seconds between being asked to stop and being stopped
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


class Job(NamedTuple):
    """A command with a name and a time limit in seconds."""

    name: str
    command: tuple[str, ...]
    limit: float


class Outcome(NamedTuple):
    """What became of a job: its exit status, None if it ran out of time, and how long it took."""

    name: str
    status: int | None
    seconds: float


def environment() -> dict[str, str]:
    """Return an environment in which the packages come from the tree, before what the caller's path adds."""
    sources = [str(ROOT / "packages" / package / "src") for package in PACKAGES]
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {**os.environ, "OMP_NUM_THREADS": "2", **settings}


def pytest_collectreport(report: Any) -> None:
    """Print a file that skips as a whole, or cannot be read; `collected` loads this module into pytest as a plugin."""
    if not report.passed and report.nodeid.endswith(".py"):
        print(f"{_TEST}gpu {report.nodeid}", flush=True)


def pytest_collection_finish(session: Any) -> None:
    """Print kind and name of every test that would run."""
    for test in session.items:
        marks = {mark.name for mark in test.iter_markers()}
        kind = next((kind for kind in ("nccl", "alone", "gpu") if MARKS[kind] in marks), None)
        if kind:
            print(f"{_TEST}{kind} {test.nodeid}", flush=True)


def collected(expression: str | None) -> dict[str, dict[Path, list[str]]]:
    """Return the GPU tests that would run, by kind and file: the file itself if it skips or cannot be read.

    Raises:
        RuntimeError: pytest did not get as far as to collect.
    """
    files = [
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in sorted((ROOT / "packages" / package / "tests" / "gpu").glob("test_*.py"))
    ]
    plugin = os.pathsep.join([str(Path(__file__).resolve().parent), environment()["PYTHONPATH"]])
    chosen = ("-k", expression) if expression else ()
    found = subprocess.run(
        (*PYTEST, "-p", "gpu_suite", "--collect-only", "--continue-on-collection-errors", *chosen,
         *map(str, files)),
        cwd=ROOT, env={**environment(), "PYTHONPATH": plugin}, capture_output=True, text=True,
    )  # fmt: skip
    if found.returncode not in (0, 1, 2, 5):
        raise RuntimeError(f"pytest could not collect:\n{found.stdout}{found.stderr}")
    tests: dict[str, dict[Path, list[str]]] = {kind: {} for kind in MARKS}
    for line in found.stdout.splitlines():
        if line.startswith(_TEST):
            kind, name = line.removeprefix(_TEST).split(" ", 1)
            tests[kind].setdefault(Path(name.split("::")[0]), []).append(name)
    return tests


def jobs_of_tests(expression: str | None, limit: float) -> dict[str, list[Job]]:
    """Return jobs of a few GPU tests each, by kind; ``expression`` goes to ``pytest -k``."""
    jobs: dict[str, list[Job]] = {}
    for kind, files in collected(expression).items():
        share, factor = (sys.maxsize, 3) if kind == "nccl" else (SHARE, 1)  # ranks stay for all tests of a file
        jobs[kind] = [
            Job(
                f"{kind}-{path.parts[1]}-{path.stem}-{number}", (*PYTEST, *tests[begin : begin + share]), factor * limit
            )
            for path, tests in files.items()
            for number, begin in enumerate(range(0, len(tests), share))
        ]
    return jobs


def devices() -> int:
    """Return the number of CUDA devices."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def benchmark_jobs(out: Path, limit: float) -> list[Job]:
    """Return the benchmarks that figures are quoted from; their JSON goes to ``out``."""
    kernels, cp = (ROOT / "packages" / package / "benchmarks" for package in ("gdn-kernels", "gdn-cp"))
    commands = {
        "operation": (kernels / "run.py", "--compare", "eager", "sdpa"),
        "stream": (kernels / "run.py", "stream_3", "stream_4", "--direction", "forward", "--state"),
        "camera": (kernels / "camera.py",),
        "context-parallel": (cp / "frame_gdn.py",),
        "delta-product": (cp / "delta_product.py",),
    }
    if devices() > 1:
        for shape in ("wm_61", "wm_121", "gdp_32768"):
            commands[f"scaling-{shape}"] = (cp / "scaling.py", shape, "--png", str(out / f"scaling-{shape}.png"))
    return [
        Job(name, (sys.executable, str(script), *given, "--json", str(out / f"{name}.json")), limit)
        for name, (script, *given) in commands.items()
    ]


def run(job: Job, out: Path) -> Outcome:
    """Run a job, its output going to a log; say how it ended."""
    begin = time.monotonic()
    with (out / f"{job.name}.log").open("w") as log:
        process = subprocess.Popen(job.command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            status: int | None = process.wait(job.limit)
        except subprocess.TimeoutExpired:
            status = None
            process.send_signal(signal.SIGINT)  # pytest then tells what has failed so far
            try:
                process.wait(LAST_WORDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    outcome = Outcome(job.name, status, time.monotonic() - begin)
    print(f"{outcome.name}: {'out of time' if status is None else status} after {outcome.seconds:.0f} s", flush=True)
    return outcome


def failed(outcome: Outcome, some_chosen: bool = False) -> bool:
    """Whether an outcome is a failure. That pytest found no test (5) is one, unless only some were asked for."""
    return outcome.status not in ((0, 5) if some_chosen else (0,))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path, help="folder for logs and results")
    parser.add_argument("--tests", metavar="EXPRESSION", help="which tests, as for pytest -k")
    parser.add_argument("--no-benchmarks", action="store_true")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that one job may take (%(default)s)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of_tests(options.tests, options.limit)
    if not any(jobs.values()):
        print("failed: no test was chosen")
        return 1
    singly = jobs["alone"]
    if devices() > 1:
        singly += jobs["nccl"]
    else:
        print(f"left out, CUDA devices here: {devices()}: what runs over NCCL")
    if not options.no_benchmarks:
        singly += benchmark_jobs(options.out.resolve(), options.limit)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda job: run(job, options.out), jobs["gpu"]))
    outcomes += [run(job, options.out) for job in singly]
    bad = [outcome.name for outcome in outcomes if failed(outcome, bool(options.tests))]
    print(f"failed: {', '.join(bad)}" if bad else "all passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
