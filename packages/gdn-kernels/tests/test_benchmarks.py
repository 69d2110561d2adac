"""The benchmark's runner on the CPU, on the smallest shape, and its registry of shapes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from agreement import assert_close

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import camera  # noqa: E402
import clips  # noqa: E402
import run as runner  # noqa: E402
import shapes  # noqa: E402


def test_runner_checks_and_times_a_shape_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    command = ["tiny", "--device", "cpu", "--dtype", "float32", "--repeats", "2", "--json", str(path)]
    (row,) = runner.main([*command, "--state", "--compare", "eager", "sdpa"])
    assert 0 < row["error_output"] < 1e-5
    assert 0 < row["error_gradient"] < 1e-5
    for column in ("floor_fwd", "floor_train", "eager_fwd", "eager_train", "eager:fwd", "eager:train", "sdpa:train"):
        assert row[column] > 0, column
    assert row["graph_fwd"] is None
    assert row["peak"] is None
    written = json.loads(path.read_text())
    assert written["rows"] == [row]
    assert written["environment"]["torch"] == torch.__version__
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].split()[0] == "tiny"
    assert "floor_train" in printed[-2]


def test_runner_draws_times_and_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"shape": "tiny", **shapes.SHAPES["tiny"]._asdict(), "floor_fwd": 0.1, "eager_fwd": 0.2, "peak": 3.0}
    runner.draw([row, {**row, "frames": 12, "peak": None}], tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


def test_runner_refuses_a_shape_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.parse(["wm_1"])
    assert "unknown shape wm_1" in capsys.readouterr().err


def test_table_leaves_out_what_was_not_measured() -> None:
    text = runner.table([{"shape": "tiny", "peak": None, "eager_fwd": 1.25}], ["peak", "eager_fwd", "sdpa:fwd"])
    assert text.splitlines()[1].split() == ["tiny", "-", "1.250", "-"]


def test_floor_counts_each_byte_once() -> None:
    shape = shapes.Shape(2, 3, 5, 7, 4, "")
    clip = clips.draw_clip(shape, torch.bfloat16, "cpu")
    output = clips.mix(clip, "torch")
    gates = [clip.beta, clip.decay, *clip.rope]
    moved = sum(x.numel() * x.element_size() for x in (clip.qkv, output, *gates))
    assert shape.forward_bytes(2) == moved
    back = moved + sum(x.numel() * x.element_size() for x in (clip.qkv, output, *gates))
    assert shape.backward_bytes(2) == back


def test_errors_see_a_wrong_output_and_one_that_is_not_a_number() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert clips.relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert clips.relative_error(torch.tensor([3.0, torch.nan]), exact) == torch.inf
    assert clips.relative_error(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) == 0
    assert clips.relative_error(torch.ones(2), torch.zeros(2, dtype=torch.float64)) > 1e300
    found = clips.errors(clips.draw_clip(shapes.SHAPES["tiny"], torch.float32, "cpu"), None, "torch")
    assert found.keys() == {"output"}


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shapes_divide_into_heads_that_are_supported(name: str) -> None:
    shape = shapes.SHAPES[name]
    assert shape.what
    assert min(shape[:5]) >= 1
    assert shape.width % 8 == 0
    assert shape.width <= 256


def test_attention_mixes_every_token() -> None:
    clip = clips.draw_clip(shapes.Shape(1, 2, 3, 2, 8, ""), torch.float64, "cpu")
    q, k, v = clip.qkv.unbind(2)
    weights = torch.softmax(torch.einsum("bnhd,bmhd->bhnm", q, k) * 8**-0.5, -1)
    assert_close(runner.attention(clip), torch.einsum("bhnm,bmhd->bnhd", weights, v), 1e-12)


def test_camera_runner_checks_times_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tiny", "--device", "cpu", "--dtype", "float32", "--repeats", "1", "--json", str(tmp_path / "t.json")]
    (row,) = camera.main(command)
    assert max(row["error"], row["error_gradient"]) < camera.BOUNDS[torch.float32]
    assert all(row[f"ratio_{step}"] > 0 for step in camera.STEPS)
    assert json.loads((tmp_path / "t.json").read_text())["rows"] == [row]
    assert "ratio_prep_train" in capsys.readouterr().out


def test_camera_runner_stops_at_an_error_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(camera, "errors", lambda inputs, impl: (0.0, float("nan")))
    with pytest.raises(SystemExit, match="tiny: relative error_gradient nan against fp64 is above"):
        camera.main(["tiny", "--device", "cpu", "--repeats", "1"])


def test_camera_floor_counts_each_byte_once() -> None:
    shape = shapes.Shape(2, 3, 5, 7, 8, "")
    inputs = camera.draw(shape, torch.bfloat16, "cpu")
    shared = [*inputs.rays, *inputs.rope]
    moved = sum(x.numel() * x.element_size() for x in (*inputs[:3], *inputs[:3], *shared))
    assert camera.moved_bytes(shape, 2)["prep_fwd"] == moved
    rays_and_x = (inputs.x, inputs.douts[4], inputs.rays[0], *inputs.rope)
    assert camera.moved_bytes(shape, 2)["out_fwd"] == sum(x.numel() * x.element_size() for x in rays_and_x)
