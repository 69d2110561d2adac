"""The benchmark of context parallelism on the CPU, on a tiny shape."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import frame_gdn as benchmark  # noqa: E402

COMMAND = ["tiny", "--device", "cpu", "--dtype", "float32", "--repeats", "2"]


def test_benchmark_checks_times_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    (row,) = benchmark.main([*COMMAND, "--json", str(path)])
    assert 0 < row["error"] < 1e-4
    for step in ("fwd", "train"):
        for who in ("local", "group", "rank"):
            assert row[f"eager_{who}_{step}"] > 0
        assert row[f"eager_rank_{step}_ratio"] == row[f"eager_rank_{step}"] / row[f"eager_local_{step}"]
    heads, width = 2, 16
    assert row["forward_bytes"] == 4 * heads * (4 * width**2 + 2 * width)
    assert row["backward_bytes"] == 4 * heads * (2 * width**2 + 2 * width)
    for name in ("published", "published_train", "ours", "ours_train"):
        assert row[f"scan_{name}"] > 0
    assert json.loads(path.read_text())["rows"] == [row]
    assert "eager_rank_train_ratio" in capsys.readouterr().out


def test_benchmark_refuses_to_time_what_is_wrong() -> None:
    with pytest.raises(SystemExit, match="thing differs by 1.0e\\+00, more than 1e-01: nothing is timed"):
        benchmark.check("thing", [torch.zeros(2)], [torch.ones(2)], 0.1)
    with pytest.raises(SystemExit, match="nothing is timed"):
        benchmark.check("thing", [torch.full((2,), torch.nan)], [torch.ones(2)], 0.1)


def test_benchmark_refuses_a_shape_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse(["wm_1"])
    assert "unknown shape wm_1" in capsys.readouterr().err
