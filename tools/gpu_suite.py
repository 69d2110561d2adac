"""Run the GPU tests and the benchmarks on a machine that has torch, Triton and pytest, but no nox.

    python tools/gpu_suite.py out                        # everything, results and logs under out/
    python tools/gpu_suite.py out --tests "cp and bfloat16" --no-benchmarks

Tests run first, several processes at once, because compiling kernels takes longer than running them; benchmarks run
after that, one at a time. Exit status 1 if anything failed or ran out of time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gdn-kernels", "gdn-cp", "gdn-models")


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
    """Return an environment in which the packages come from the tree."""
    path = os.pathsep.join(str(ROOT / "packages" / package / "src") for package in PACKAGES)
    settings = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {**os.environ, "OMP_NUM_THREADS": "2", **settings}


def test_jobs(expression: str | None, limit: float) -> list[Job]:
    """Return a job for every file of GPU tests; ``expression`` goes to ``pytest -k``."""
    chosen = ("-k", expression) if expression else ()
    return [
        Job(
            f"{package}-{path.stem}",
            (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *chosen, str(path)),
            limit,
        )
        for package in PACKAGES
        for path in sorted((ROOT / "packages" / package / "tests" / "gpu").glob("test_*.py"))
    ]


def benchmark_jobs(out: Path, limit: float) -> list[Job]:
    """Return the benchmarks that figures are quoted from; their JSON goes to ``out``."""
    kernels, cp = (ROOT / "packages" / package / "benchmarks" for package in ("gdn-kernels", "gdn-cp"))
    commands = {
        "operation": (kernels / "run.py", "--compare", "eager", "sdpa"),
        "stream": (kernels / "run.py", "stream_3", "stream_4", "--direction", "forward", "--state"),
        "camera": (kernels / "camera.py",),
        "context-parallel": (cp / "frame_gdn.py",),
    }
    return [
        Job(name, (sys.executable, str(script), *given, "--json", str(out / f"{name}.json")), limit)
        for name, (script, *given) in commands.items()
    ]


def run(job: Job, out: Path) -> Outcome:
    """Run a job, its output going to a log; say how it ended."""
    begin = time.monotonic()
    with (out / f"{job.name}.log").open("w") as log:
        try:
            done = subprocess.run(
                job.command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT, timeout=job.limit
            )
            status: int | None = done.returncode
        except subprocess.TimeoutExpired:
            status = None
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
    jobs = test_jobs(options.tests, options.limit)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        outcomes = list(pool.map(lambda job: run(job, options.out), jobs))
    if not options.no_benchmarks:
        outcomes += [run(job, options.out) for job in benchmark_jobs(options.out.resolve(), options.limit)]
    bad = [outcome.name for outcome in outcomes if failed(outcome)]
    print(f"failed: {', '.join(bad)}" if bad else "all passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
