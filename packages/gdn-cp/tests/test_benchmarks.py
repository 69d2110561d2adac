"""The benchmarks on the CPU: what context parallelism costs on one device, and what schedules are predicted to take."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import delta_product  # noqa: E402
import frame_gdn as costs  # noqa: E402
import overlap  # noqa: E402
import scaling  # noqa: E402
import schedules  # noqa: E402

from gdn_cp import FramePartition  # noqa: E402
from gdn_cp.cost_model import LINKS, SCHEDULES, Link, MapTimes, message_bytes  # noqa: E402

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


ON_TWO_RANKS = ["--device", "cpu", "--ranks", "2", "--repeats", "1"]
CONFIGURATIONS = [(fixed, schedule) for fixed in ("per rank", "total") for schedule in SCHEDULES]


@pytest.mark.ranks
def test_scaling_checks_and_times_every_schedule_over_ranks(tmp_path, capsys):
    path, chart = tmp_path / "scaling.json", tmp_path / "scaling.png"
    png = ["--png", str(chart)] if importlib.util.find_spec("matplotlib") else []
    rows = scaling.main(["tiny", "tiny_tokens", *ON_TWO_RANKS, "--json", str(path), *png])
    expected = [(shape, *case) for shape in ("tiny", "tiny_tokens") for case in CONFIGURATIONS]
    assert [(row["shape"], row["fixed"], row["schedule"]) for row in rows] == expected
    for row in rows:
        is_total, is_gather = row["fixed"] == "total", row["schedule"] == "all_gather"
        assert (row["ranks"], row["group"], row["backend"]) == (2, "gloo", "torch")
        if row["shape"] == "tiny":
            assert row["counts"] == ([3, 2] if is_total else [5, 5])
            transition, state = 2 * 4 * 2 * 16**2, 4 * 2 * (16**2 + 16)
            # a rank of two on a line sends its state one way, or its window
            message = {"all_gather": transition + 2 * state, "chain": state, "doubling": transition + state}
            assert row["sent"] == [message[row["schedule"]], 2 * state if is_gather else message[row["schedule"]]]
        for name in ("alone", "share", "step", "compute", "communication", "exposed", "exchange", "predicted"):
            assert 0 < row[name] < 1e5, name
        assert row["exposed"] <= row["communication"]
        assert row["exposed"] == max(row["exposed_of_ranks"])
        assert row["efficiency"] == row["alone"] / row["step"] / (2 if is_total else 1)
        assert len(row["errors"]) == (4 if row["shape"] == "tiny" else 6)
        assert max(row["errors"].values()) < 1e-4
        assert row["link"]["compose"] not in (0.0, Link("assumed", 1.0, 1.0).compose)
    written = json.loads(path.read_text())
    assert written["rows"] == rows
    assert written["environment"]["dtype"] == "float32"
    assert "efficiency" in capsys.readouterr().out
    assert not png or chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.ranks
def test_scaling_predicts_what_each_pass_sends(monkeypatch):
    """Doubling composes maps in a backward pass too: its transitions are counted twice, those of a gather once."""
    link = Link("a byte per nanosecond", 0.0, 1.0, 0.0, 0.0, 0.0)
    monkeypatch.setattr(scaling, "measure_link", lambda *_, **__: link)
    monkeypatch.setattr(scaling, "measure_maps", lambda *_, **__: MapTimes(0.0, 0.0, 0.0))
    monkeypatch.setattr(scaling, "measure", lambda work, setting: {"predicted": work.predicted, "alone": 1, "step": 1})
    monkeypatch.setattr(scaling, "table", lambda rows: "")
    rows = scaling.main(["tiny", "tiny_tokens", *ON_TWO_RANKS])
    transition, state = message_bytes(16, 2)
    square, column = 4 * 4 * 8 * 8, 4 * 4 * 8 * 4  # fp32, four heads, K = 8, V = 4
    frames = {"all_gather": transition + 4 * state, "chain": 2 * state, "doubling": 2 * (transition + state)}
    tokens = {"all_gather": 2 * (square + column), "chain": 2 * column, "doubling": 2 * (square + column)}
    for row in rows:
        sent = (frames if row["shape"] == "tiny" else tokens)[row["schedule"]]
        assert row["predicted"] == pytest.approx(1e-6 * sent)


@pytest.mark.ranks
def test_scaling_refuses_to_time_what_is_wrong_and_keeps_what_it_has(tmp_path, monkeypatch):
    """Ranks differ from one device in the last bits: too much for a tolerance of nothing, from the second row on."""
    path, check = tmp_path / "scaling.json", scaling.checked

    def strict(work, setting):
        if setting.context.schedule == "chain":
            monkeypatch.setattr(scaling, "TOLERANCES", {torch.float32: (0.0, 0.0, 0.0)})
        return check(work, setting)

    monkeypatch.setattr(scaling, "checked", strict)
    with pytest.raises(Exception, match="output differs from one device by .* on 2 ranks by chain: nothing is timed"):
        scaling.main(["tiny", *ON_TWO_RANKS, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["fixed"], row["schedule"]) for row in rows] == [("per rank", "all_gather")]


def test_scaling_knows_the_clips_that_figures_are_for_and_refuses_one_rank(capsys):
    for name, counts in {"wm_61": (8,) * 5 + (7,) * 3, "wm_121": (16,) + (15,) * 7}.items():
        assert FramePartition.even(scaling.FRAMES[name].frames, 8).counts == counts
    with pytest.raises(SystemExit):
        scaling.parse(["tiny", "--device", "cpu", "--ranks", "1"])
    assert "needs two ranks or more" in capsys.readouterr().err


def event(category, name, begin, end, *, thread=1, correlation=None):
    arguments = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": thread, "args": arguments}


def test_what_no_kernel_hides_is_exposed():
    """NCCL's kernels by name, whatever else a range launched by its launch; only inside of steps."""
    step = [
        event("user_annotation", overlap.STEP, 0, 1000),
        event("user_annotation", "gdn_cp: cp_frame_gdn forward", 100, 200, thread=2),
        event("cuda_runtime", "cudaLaunchKernelExC", 120, 125, thread=2, correlation=1),
        event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 200, 500, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 210, 215, thread=2, correlation=2),
        event("kernel", "phase_b_kernel", 300, 400, correlation=2),
        event("cuda_runtime", "cudaMemcpyAsync", 150, 155, thread=2, correlation=3),
        event("gpu_memcpy", "Memcpy PtoP", 600, 650, correlation=3),
        event("cuda_driver", "cuLaunchKernel", 150, 155, thread=1, correlation=4),  # another thread
        event("kernel", "phase_c_kernel", 620, 700, correlation=4),
        event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 800, 900),
        event("gpu_user_annotation", "gdn_cp: cp_frame_gdn forward", 0, 1000),
        event("kernel", "of another step", 1000, 2000),
        {"ph": "i", "name": "an instant", "ts": 3},
    ]
    assert overlap.steps_of(step) == [overlap.Spent(0.45, 0.32, 0.18)]


def test_on_the_cpu_a_thread_in_a_range_does_nothing_else():
    step = [
        event("user_annotation", overlap.STEP, 0, 1000),
        event("user_annotation", "gdn_cp: x forward", 100, 200),
        event("user_annotation", "gloo:all_gather", 150, 500, thread=7),
        event("user_annotation", "gdn_cp: x forward", 450, 600),
        event("user_annotation", overlap.STEP, 2000, 3000),
    ]
    assert overlap.steps_of(step) == [overlap.Spent(0.5, 0.25, 0.75), overlap.Spent(0.0, 0.0, 1.0)]


def test_time_covered_twice_counts_once():
    assert overlap.union([(3, 4), (0, 2), (1, 3), (5, 5)]) == [(0, 4)]
    assert overlap.outside([(0, 4), (6, 8)], [(1, 2), (7, 9)]) == 4
    assert overlap.total(overlap.within([(0, 4), (6, 8)], (3, 7))) == 2
