"""Run the GPU tests and the benchmarks on a machine that has torch, Triton and pytest, but no nox.

    python tools/gpu_suite.py out                        # everything, results and logs under out/
    python tools/gpu_suite.py out --tests "cp and bfloat16" --no-benchmarks

Tests run first, a process for every few of them and a process per core at once, because compiling kernels takes longer
than running them; then, one at a time, the tests that need most of the GPU's memory, and the benchmarks. Exit status 1
if anything failed or ran out of time.
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gdn-kernels", "gdn-cp", "gdn-models")
SHARE = 5  # tests of one process: neighbours use the same kernels
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


def tests_of(path: Path, expression: str | None, marks: str) -> list[str]:
    """Return the tests of a file that would run, by name; the file itself if they cannot be told apart."""
    chosen = ("-k", expression) if expression else ()
    found = subprocess.run(
        (*PYTEST, "--collect-only", "-m", marks, *chosen, str(path)),
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    tests = [line for line in found.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", " "))]
    return tests if found.returncode == 0 or "deselected" in found.stdout else [str(path)]


def jobs_of_tests(expression: str | None, limit: float, alone: bool = False) -> list[Job]:
    """Return jobs of a few GPU tests each, of those that must run alone or of the others.

    ``expression`` goes to ``pytest -k``.
    """
    marks, name = ("whole_gpu", "alone-") if alone else ("gpu and not whole_gpu", "")
    files = [
        (package, path)
        for package in PACKAGES
        for path in sorted((ROOT / "packages" / package / "tests" / "gpu").glob("test_*.py"))
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        collected = pool.map(lambda file: tests_of(file[1], expression, marks), files)
    return [
        Job(f"{name}{package}-{path.stem}-{number}", (*PYTEST, *tests[begin : begin + SHARE]), limit)
        for (package, path), tests in zip(files, collected)
        for number, begin in enumerate(range(0, len(tests), SHARE))
    ]


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
        commands["scaling"] = (cp / "scaling.py", "--png", str(out / "scaling.png"))
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


def failed(outcome: Outcome) -> bool:
    """Whether an outcome is a failure; tests of which none were chosen (5) are not."""
    return outcome.status not in (0, 5)


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
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda job: run(job, options.out), jobs))
    singly = jobs_of_tests(options.tests, options.limit, alone=True)
    if not options.no_benchmarks:
        singly += benchmark_jobs(options.out.resolve(), options.limit)
    outcomes += [run(job, options.out) for job in singly]
    bad = [outcome.name for outcome in outcomes if failed(outcome)]
    print(f"failed: {', '.join(bad)}" if bad else "all passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
