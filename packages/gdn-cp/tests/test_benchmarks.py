"""The benchmark of schedules: its table, its JSON, its plot, and that the stored results are those of the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import schedules as benchmark  # noqa: E402

from gdn_cp.cost_model import LINKS  # noqa: E402


def test_it_prints_and_writes_what_the_model_says(tmp_path, capsys):
    rows = benchmark.main(["--json", str(tmp_path / "schedules.json")])
    printed = capsys.readouterr().out.splitlines()
    assert "| nvlink | 2 | 32 | 22 | 33 | chain |" in printed
    assert "| infiniband | 64 | 5922 | 1982 | 601 | doubling |" in printed
    assert len(printed) == 2 + len(rows) == 2 + len(LINKS) * len(benchmark.SIZES)
    written = json.loads((tmp_path / "schedules.json").read_text())
    assert written["rows"] == rows
    assert written["model"]["transition_bytes"] == 2007040
    assert [link["name"] for link in written["model"]["links"]] == list(LINKS)


def test_the_stored_results_are_those_of_the_model(tmp_path):
    benchmark.main(["--json", str(tmp_path / "schedules.json")])
    stored = json.loads((BENCHMARKS / "results" / "schedules.json").read_text())
    again = json.loads((tmp_path / "schedules.json").read_text())
    assert stored["model"] == again["model"]
    for row, other in zip(stored["rows"], again["rows"], strict=True):
        assert row == pytest.approx(other)


def test_it_draws(tmp_path):
    pytest.importorskip("matplotlib")
    benchmark.main(["--png", str(tmp_path / "schedules.png")])
    assert (tmp_path / "schedules.png").read_bytes().startswith(b"\x89PNG")
