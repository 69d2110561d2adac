"""The suite of a machine with a GPU: what it would run, and how it reports what went wrong."""

from __future__ import annotations

import sys

import gpu_suite
import pytest


def test_the_tests_of_a_file_are_shared_out(tmp_path, monkeypatch):
    folder = tmp_path / "packages" / "gdn-cp" / "tests" / "gpu"
    folder.mkdir(parents=True)
    cases = "import pytest\n\n\n@pytest.mark.gpu\n@pytest.mark.parametrize('x', range(11))\ndef test_{}(x): ...\n"
    large = "\n\n@pytest.mark.gpu\n@pytest.mark.whole_gpu\ndef test_large_these(): ...\n"
    (folder / "test_some.py").write_text(cases.format("these") + cases.format("those") + large)
    over_nccl = cases.replace("mark.gpu", "mark.gpu\n@pytest.mark.nccl").format("over_ranks")
    (folder / "test_ranks.py").write_text(over_nccl)
    marks = "    gpu: on a GPU\n    whole_gpu: on all of it\n    nccl: on several\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{marks}")
    monkeypatch.setattr(gpu_suite, "ROOT", tmp_path)
    (folder / "test_away.py").write_text("import pytest\n\npytest.skip('no device', allow_module_level=True)\n")
    (folder / "test_wrong.py").write_text("import nothing_of_that_name\n")
    (folder / "test_other.py").write_text(cases.format("others"))

    def given(jobs):
        return [job.command[len(gpu_suite.PYTEST) :] for job in jobs]

    path = "packages/gdn-cp/tests/gpu"
    jobs = gpu_suite.jobs_of_tests("these or over", 7.0)
    # a file that skips or cannot be read is run, for its log to say why; one without a test of that name is not
    assert sorted(len(tests) for tests in given(jobs["gpu"])) == [1, 1, 1, 5, 5]
    some = [f"{path}/test_some.py::test_these[{x}]" for x in range(11)]
    found = [test for tests in given(jobs["gpu"]) for test in tests]
    assert sorted(found) == sorted([*some, f"{path}/test_away.py", f"{path}/test_wrong.py"])
    assert given(jobs["alone"]) == [(f"{path}/test_some.py::test_large_these",)]
    assert [job.name for job in jobs["alone"]] == ["alone-gdn-cp-test_some-0"]
    # one process, whose ranks stay for all of them
    assert given(jobs["nccl"]) == [tuple(f"{path}/test_ranks.py::test_over_ranks[{x}]" for x in range(11))]
    assert [job.name for job in jobs["nccl"]] == ["nccl-gdn-cp-test_ranks-0"]


def test_benchmarks_are_there_and_write_to_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "devices", lambda: 1)
    single = gpu_suite.benchmark_jobs(tmp_path, 1.0)
    monkeypatch.setattr(gpu_suite, "devices", lambda: 2)
    several = gpu_suite.benchmark_jobs(tmp_path, 1.0)
    more = [job.name for job in several if job not in single]
    assert more == ["scaling-wm_61", "scaling-wm_121", "scaling-gdp_32768"]
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
    handler = "default_int_handler" if heeds else "SIG_IGN"  # a shell's background job starts out ignoring it
    program = (
        f"import signal, time\nsignal.signal(signal.SIGINT, signal.{handler})\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('so far')"
    )
    job = gpu_suite.Job("slow", (sys.executable, "-I", "-S", "-c", program), 2.0)
    outcome = gpu_suite.run(job, tmp_path)
    assert gpu_suite.failed(outcome)
    assert outcome.seconds < 30
    assert "slow: out of time" in capsys.readouterr().out
    assert (tmp_path / "slow.log").read_text() == ("so far\n" if heeds else "")


def test_a_process_that_finds_no_test_is_a_failure(tmp_path):
    """A job names tests that were collected: that none of them is there means that something is wrong."""
    empty = tmp_path / "test_empty.py"
    empty.write_text("import pytest\n\npytest.skip('needs a device', allow_module_level=True)\n")
    job = gpu_suite.Job("empty", (*gpu_suite.PYTEST, "-c", str(tmp_path / "none.ini"), str(empty)), 60.0)
    (tmp_path / "none.ini").write_text("[pytest]\n")
    outcome = gpu_suite.run(job, tmp_path)
    assert outcome.status == 5
    assert gpu_suite.failed(outcome)
    assert not gpu_suite.failed(outcome, some_chosen=True)


def suite(monkeypatch, jobs, *, devices=1):
    """Let the suite have these jobs, by kind."""
    monkeypatch.setattr(gpu_suite, "devices", lambda: devices)
    found = {kind: list(jobs.get(kind, [])) for kind in gpu_suite.MARKS}
    monkeypatch.setattr(gpu_suite, "jobs_of_tests", lambda expression, limit: found)


def job(name, program):
    return gpu_suite.Job(name, (sys.executable, "-c", program), 30.0)


def test_the_suite_says_what_failed(tmp_path, monkeypatch, capsys):
    good, bad = job("good", "pass"), job("bad", "raise SystemExit(1)")
    suite(monkeypatch, {"gpu": [good, bad]})
    assert gpu_suite.main([str(tmp_path / "out"), "--no-benchmarks"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "failed: bad"
    suite(monkeypatch, {"gpu": [good]})
    assert gpu_suite.main([str(tmp_path / "out"), "--no-benchmarks"]) == 0
    suite(monkeypatch, {})
    assert gpu_suite.main([str(tmp_path / "out"), "--tests", "nothing of that name"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "failed: no test was chosen"


def test_what_runs_over_nccl_runs_alone_and_only_on_several_devices(tmp_path, monkeypatch, capsys):
    """It starts when everything before has ended, and has ended before anything after starts."""
    log = tmp_path / "log"
    program = "import time; f = open({!r}, 'a'); f.write('<{}'); f.flush(); time.sleep(0.3); f.write('{}>')"
    jobs = {kind: [job(kind, program.format(str(log), n, n))] for n, kind in enumerate(gpu_suite.MARKS)}
    suite(monkeypatch, jobs, devices=2)
    assert gpu_suite.main([str(tmp_path / "out"), "--no-benchmarks"]) == 0
    assert log.read_text() == "<00><11><22>"
    log.unlink()
    suite(monkeypatch, jobs, devices=1)
    assert gpu_suite.main([str(tmp_path / "out"), "--no-benchmarks"]) == 0
    assert log.read_text() == "<00><11>"
    assert "left out, CUDA devices here: 1: what runs over NCCL" in capsys.readouterr().out
