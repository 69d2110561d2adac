"""The suite of a machine with a GPU: what it would run, and how it reports what went wrong."""

from __future__ import annotations

import sys

import gpu_suite
import pytest


def test_every_file_of_gpu_tests_is_in_a_job():
    jobs = gpu_suite.jobs_of_tests(None, 7.0)
    given = [argument.split("::")[0] for job in jobs for argument in job.command[len(gpu_suite.PYTEST) :]]
    files = sorted(gpu_suite.ROOT.glob("packages/*/tests/gpu/test_*.py"))
    assert len(files) >= 5
    assert {gpu_suite.ROOT / name for name in given} == set(files)
    assert len({job.name for job in jobs}) == len(jobs)
    assert {job.limit for job in jobs} == {7.0}


def test_the_tests_of_a_file_are_shared_out(tmp_path, monkeypatch):
    folder = tmp_path / "packages" / "gdn-cp" / "tests" / "gpu"
    folder.mkdir(parents=True)
    cases = "import pytest\n\n\n@pytest.mark.gpu\n@pytest.mark.parametrize('x', range(11))\ndef test_{}(x): ...\n"
    large = "\n\n@pytest.mark.gpu\n@pytest.mark.whole_gpu\ndef test_large_these(): ...\n"
    (folder / "test_some.py").write_text(cases.format("these") + cases.format("those") + large)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: on a GPU\n    whole_gpu: on all of it\n")
    monkeypatch.setattr(gpu_suite, "ROOT", tmp_path)
    jobs = gpu_suite.jobs_of_tests("these", 7.0)
    given = [job.command[len(gpu_suite.PYTEST) :] for job in jobs]
    path = "packages/gdn-cp/tests/gpu/test_some.py"
    assert [len(tests) for tests in given] == [5, 5, 1]
    assert [test for tests in given for test in tests] == [f"{path}::test_these[{x}]" for x in range(11)]
    (job,) = gpu_suite.jobs_of_tests(None, 7.0, alone=True)
    assert job.command[len(gpu_suite.PYTEST) :] == (f"{path}::test_large_these",)
    assert job.name == "alone-gdn-cp-test_some-0"


def test_benchmarks_are_there_and_write_to_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "devices", lambda: 1)
    single = gpu_suite.benchmark_jobs(tmp_path, 1.0)
    monkeypatch.setattr(gpu_suite, "devices", lambda: 2)
    several = gpu_suite.benchmark_jobs(tmp_path, 1.0)
    assert [job.name for job in several if job not in single] == ["scaling"]
    for job in several:
        assert gpu_suite.Path(job.command[1]).is_file()
        assert job.command[-2:] == ("--json", str(tmp_path / f"{job.name}.json"))


@pytest.mark.parametrize("program, status", [("raise SystemExit(3)", 3), ("print('fine')", 0)])
def test_a_job_ends_with_its_status_and_a_log(tmp_path, capsys, program, status):
    outcome = gpu_suite.run(gpu_suite.Job("one", (sys.executable, "-c", program), 30.0), tmp_path)
    assert outcome.status == status
    assert gpu_suite.failed(outcome) == bool(status)
    assert (tmp_path / "one.log").read_text() == ("fine\n" if not status else "")
    assert f"one: {status} after" in capsys.readouterr().out


@pytest.mark.parametrize("heeds", [True, False])
def test_a_job_that_runs_out_of_time_is_a_failure_and_has_last_words(tmp_path, capsys, monkeypatch, heeds):
    monkeypatch.setattr(gpu_suite, "LAST_WORDS", 5.0 if heeds else 0.2)
    ignore = "" if heeds else "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    program = f"{ignore}\nimport time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('so far')"
    job = gpu_suite.Job("slow", (sys.executable, "-c", program), 2.0)
    outcome = gpu_suite.run(job, tmp_path)
    assert gpu_suite.failed(outcome)
    assert outcome.seconds < 30
    assert "slow: out of time" in capsys.readouterr().out
    assert (tmp_path / "slow.log").read_text() == ("so far\n" if heeds else "")


def test_no_tests_chosen_is_no_failure():
    assert not gpu_suite.failed(gpu_suite.Outcome("none", 5, 0.1))


def test_the_suite_says_what_failed(tmp_path, monkeypatch, capsys):
    commands = {"good": "pass", "bad": "raise SystemExit(1)"}
    jobs = [gpu_suite.Job(name, (sys.executable, "-c", program), 30.0) for name, program in commands.items()]
    monkeypatch.setattr(gpu_suite, "jobs_of_tests", lambda expression, limit, alone=False: [] if alone else jobs)
    assert gpu_suite.main([str(tmp_path / "out"), "--no-benchmarks"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "failed: bad"
    monkeypatch.setattr(gpu_suite, "jobs_of_tests", lambda expression, limit, alone=False: [] if alone else jobs[:1])
    assert gpu_suite.main([str(tmp_path / "out"), "--no-benchmarks"]) == 0
