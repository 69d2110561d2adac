"""The second demo: ranks agree on packed sequences that cross from one to the next, and it notices when they do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "byte_language_model"

pytestmark = pytest.mark.ranks


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_two_steps_on_three_ranks_agree_and_draw_the_picture(tmp_path):
    done = run("--steps", "2", "--ranks", "3", "--out", str(tmp_path / "new" / "curves.png"))
    assert done.returncode == 0, done.stderr
    assert "one process and ranks agree" in done.stdout
    assert "chunkwise_cp forward" in done.stdout
    assert "tokens of each (85, 128, 171)" in done.stdout
    assert (tmp_path / "new" / "curves.png").stat().st_size > 5_000


def test_a_missing_sum_of_gradients_is_exit_status_1(tmp_path):
    done = run("--steps", "2", "--break-it", "--out", str(tmp_path / "curves.png"))
    assert done.returncode == 1, done.stderr
    assert "one process and ranks DISAGREE" in done.stdout


def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    done = run("--out", str(tmp_path / "file" / "curves.png"))
    assert done.returncode == 2
    (sentence,) = done.stderr.strip().splitlines()
    assert sentence.startswith("demo: cannot write ")
