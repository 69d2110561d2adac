"""The benchmarks on the CPU: what context parallelism costs on one device, and what schedules are predicted to take."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import delta_product  # noqa: E402
import frame_gdn as costs  # noqa: E402
import scaling  # noqa: E402
import schedules  # noqa: E402

from gdn_cp.cost_model import LINKS, SCHEDULES  # noqa: E402

COMMAND = ["tiny", "--device", "cpu", "--dtype", "float32", "--repeats", "2"]


def test_costs_checks_times_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    (row,) = costs.main([*COMMAND, "--json", str(path)])
    assert 0 < row["error"] < 1e-4
    for step in ("fwd", "train"):
        for who in ("local", "group", "rank"):
            assert row[f"eager_{who}_{step}"] > 0
        assert row[f"eager_rank_{step}_ratio"] == row[f"eager_rank_{step}"] / row[f"eager_local_{step}"]
    heads, width = 2, 16
    assert row["forward_bytes"] == 4 * heads * (4 * width**2 + 2 * width)
    assert row["backward_bytes"] == 4 * heads * (2 * width**2 + 2 * width)
    for part in ("begin", "folds", "finish", "back_begin", "back_folds", "back_finish"):
        assert row[f"part_{part}"] > 0
    for name in ("published", "published_train", "ours", "ours_train"):
        assert row[f"scan_{name}"] > 0
    written = json.loads(path.read_text())
    assert written["rows"] == [row]
    assert written["environment"].keys() == {"device", "torch", "triton", "dtype"}
    assert "eager_rank_train_ratio" in capsys.readouterr().out


def test_costs_refuses_to_time_what_is_wrong() -> None:
    with pytest.raises(SystemExit, match="thing differs by 1.0e\\+00, more than 1e-01: nothing is timed"):
        costs.check("thing", [torch.zeros(2)], [torch.ones(2)], 0.1)
    with pytest.raises(SystemExit, match="nothing is timed"):
        costs.check("thing", [torch.full((2,), torch.nan)], [torch.ones(2)], 0.1)


def test_costs_refuses_a_shape_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        costs.parse(["wm_1"])
    assert "unknown shape wm_1" in capsys.readouterr().err


def test_delta_product_checks_times_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "delta_product.json"
    (row,) = delta_product.main([*COMMAND, "--backend", "torch", "--json", str(path)])
    assert 0 < max(row["output_error"], row["gradient_error"], row["gate_error"]) < 1e-5
    assert row["fwd_ms"] > 0
    assert row["train_ms"] > 0
    assert json.loads(path.read_text())["rows"] == [row]
    assert "train_ms" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        delta_product.parse(["huge"])
    assert "unknown shape huge" in capsys.readouterr().err


def test_it_prints_and_writes_what_the_model_says(tmp_path, capsys):
    rows = schedules.main(["--json", str(tmp_path / "schedules.json")])
    printed = capsys.readouterr().out.splitlines()
    assert "| nvlink | 2 | 32 | 22 | 33 | chain |" in printed
    assert "| infiniband | 64 | 5922 | 1982 | 601 | doubling |" in printed
    assert len(printed) == 2 + len(rows) == 2 + len(LINKS) * len(schedules.SIZES)
    written = json.loads((tmp_path / "schedules.json").read_text())
    assert written["rows"] == rows
    assert written["model"]["transition_bytes"] == 2007040
    assert [link["name"] for link in written["model"]["links"]] == list(LINKS)


def test_the_stored_results_are_those_of_the_model(tmp_path):
    schedules.main(["--json", str(tmp_path / "schedules.json")])
    stored = json.loads((BENCHMARKS / "results" / "schedules.json").read_text())
    again = json.loads((tmp_path / "schedules.json").read_text())
    assert stored["model"] == again["model"]
    for row, other in zip(stored["rows"], again["rows"], strict=True):
        assert row == pytest.approx(other)


def test_the_table_of_the_readme_is_that_of_the_model():
    sizes, rows = (2, 4, 8, 16, 32, 64), schedules.main([])
    text = (BENCHMARKS.parent / "README.md").read_text()
    for link in LINKS.values():
        cells = [f'`"{link.name}"`, {link.latency:g} us, {link.bandwidth:g} GB/s']
        for row in (row for row in rows if row["link"] == link.name and row["ranks"] in sizes):
            times = {name: f"{row[name]:.0f}" for name in SCHEDULES}
            times[row["auto"]] = f"**{times[row['auto']]}**"
            cells.append(" / ".join(times.values()))
        assert f"| {' | '.join(cells)} |" in text


def test_it_draws(tmp_path):
    pytest.importorskip("matplotlib")
    schedules.main(["--png", str(tmp_path / "schedules.png")])
    assert (tmp_path / "schedules.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ranks
def test_scaling_times_every_schedule_over_ranks(tmp_path, capsys):
    path = tmp_path / "scaling.json"
    options = ["--device", "cpu", "--ranks", "2", "--repeats", "1", "--json", str(path)]
    rows = scaling.main(["tiny", "tiny_tokens", *options])
    assert [(row["shape"], row["fixed"], row["schedule"]) for row in rows] == [
        *(("tiny", x, schedule) for x in ("per rank", "total") for schedule in ("all_gather", "chain", "doubling")),
        ("tiny_tokens", "per rank", "all_gather"),
    ]
    for row in rows:
        assert row["step"] > 0
        assert row["efficiency"] == row["alone"] / row["step"]
        assert row["predicted"] > 0
        assert (row["exchange"] is not None) == (row["schedule"] == "all_gather")
    assert json.loads(path.read_text())["rows"] == rows
    assert "efficiency" in capsys.readouterr().out


def test_scaling_draws_and_refuses_one_rank(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    row = {"shape": "tiny", "fixed": "total", "schedule": "chain", "efficiency": 0.9, "ranks": 2}
    scaling.draw_chart([row], tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        scaling.parse(["tiny", "--device", "cpu", "--ranks", "1"])
    assert "needs two ranks or more" in capsys.readouterr().err
