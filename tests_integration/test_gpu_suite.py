"""The suite of a machine with a GPU knows every file of GPU tests, as far as an installation can read them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))  # tools are scripts, not a package
import gpu_suite


def test_every_file_of_gpu_tests_is_in_a_job():
    jobs = [job for of_kind in gpu_suite.jobs_of_tests(None, 7.0).values() for job in of_kind]
    given = [argument.split("::")[0] for job in jobs for argument in job.command[len(gpu_suite.PYTEST) :]]
    files = sorted(gpu_suite.ROOT.glob("packages/*/tests/gpu/test_*.py"))
    assert len(files) >= 5
    assert {gpu_suite.ROOT / name for name in given} == set(files)
    assert len({job.name for job in jobs}) == len(jobs)
    assert {job.limit for job in jobs} == {7.0, 21.0}  # that over NCCL is one for all numbers of ranks
