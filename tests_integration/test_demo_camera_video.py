"""The third demo: ranks agree, a stream equals a single call, cameras are exact, and the model looks there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

DEMO = Path(__file__).parent.parent / "examples" / "camera_video"
sys.path[:0] = [str(DEMO), str(DEMO.parent)]

import footage  # noqa: E402  the folders above are on the path now
import predictor  # noqa: E402
import proof  # noqa: E402
import scene  # noqa: E402
import stream  # noqa: E402
import training  # noqa: E402

from gdn_models import ray_transforms  # noqa: E402

pytestmark = pytest.mark.ranks


def main(*arguments):
    """Run the demo in this process; its module is loaded under a name that no other demo has."""
    spec = importlib.util.spec_from_file_location("camera_video_run", DEMO / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(arguments)


def test_two_steps_on_three_ranks_agree_and_draw_the_picture(tmp_path, capfd):
    picture = tmp_path / "new" / "picture.png"
    assert main("--steps", "2", "--ranks", "3", "--out", str(picture)) == 0
    shown = capfd.readouterr().out
    assert "one process and ranks agree" in shown
    assert "cp_frame_gdn_numerator backward" in shown
    assert "stream against a single call" in shown
    assert picture.stat().st_size > 10_000


def test_a_missing_sum_of_gradients_is_exit_status_1(tmp_path, capfd):
    assert main("--steps", "2", "--break-it", "--out", str(tmp_path / "picture.png")) == 1
    assert "one process and ranks DISAGREE" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"), [(("--clip", "no.mp4"), "there is no file"), (("--out", "{file}/x.png"), "cannot write")]
)
def test_what_cannot_be_read_or_written_is_one_sentence(tmp_path, capfd, arguments, says):
    (tmp_path / "file").touch()
    assert main(*(argument.format(file=tmp_path / "file") for argument in arguments)) == 2
    (sentence,) = capfd.readouterr().err.strip().splitlines()
    assert sentence.startswith("demo: ")
    assert says in sentence


def test_a_window_shows_what_its_camera_looks_at():
    """A source whose colours are the angles of its pixels: cropped and scaled, a pixel's colour is that of its ray."""
    x = (torch.arange(scene.SOURCE_WIDTH) + 0.5 - scene.SOURCE_WIDTH / 2) / scene.FOCAL
    y = (torch.arange(scene.SOURCE_HEIGHT) + 0.5 - scene.SOURCE_HEIGHT / 2) / scene.FOCAL
    source = torch.stack((x.expand(len(y), -1), y[:, None].expand(-1, len(x)), torch.zeros(len(y), len(x))))
    windows = scene.random_windows(4, 5, torch.Generator().manual_seed(0))
    views = scene.look(source.expand(4, -1, -1, -1), windows)
    seen = scene_pixels(views.tokens)
    fx, fy, cx, cy = views.camera[..., 16:, None, None].unbind(2)
    a = (torch.arange(scene.WIDTH) + 0.5 - cx) / fx
    b = (torch.arange(scene.HEIGHT)[:, None] + 0.5 - cy) / fy
    inside = (slice(None), slice(None), slice(1, -1), slice(1, -1))  # the source ends half a pixel within its edge
    for found, wanted in ((seen[..., 0], a.expand(seen.shape[:-1])), (seen[..., 1], b.expand(seen.shape[:-1]))):
        torch.testing.assert_close(found[inside], wanted[inside], atol=1e-5, rtol=0)


def scene_pixels(tokens):
    """Return the pixels ``[B, F, height, width, 3]`` of tokens, each at its place, one patch at a time."""
    size, (rows, columns) = scene.PATCH, scene.SPATIAL
    pixels = torch.zeros(*tokens.shape[:2], scene.HEIGHT, scene.WIDTH, 3)
    for row in range(rows):
        for column in range(columns):
            patch = tokens[:, :, row * columns + column].unflatten(-1, (size, size, 3))
            pixels[:, :, row * size : (row + 1) * size, column * size : (column + 1) * size] = patch
    return pixels


def test_rays_of_one_point_agree_between_windows():
    """A token whose corner is at the same source pixel in two windows has the same ray in both."""
    width = torch.tensor([scene.LEAST, scene.LEAST])
    pitch = scene.PATCH * scene.LEAST / scene.WIDTH  # source pixels per token
    windows = torch.stack((torch.tensor([10.0, 10.0 + 2 * pitch]), torch.tensor([3.0, 3.0 + pitch]), width), -1)
    grid = (1, *scene.SPATIAL)
    first, second = (
        ray_transforms(camera[None, None], grid, (1, scene.PATCH, scene.PATCH)).world_to_ray.unflatten(1, grid)
        for camera in scene.cameras(windows)
    )
    torch.testing.assert_close(first[:, :, 1:, 2:], second[:, :, :-1, :-2])


def test_tokens_and_frames_are_inverse():
    frames = torch.rand(2, 3, 3, scene.HEIGHT, scene.WIDTH)
    again = scene.to_frames(scene.to_tokens(frames * 2 - 1))
    torch.testing.assert_close(again, frames.movedim(2, -1))


def test_a_stream_equals_a_single_call_and_a_lost_state_is_noticed(monkeypatch):
    views = training.evaluation_views(scene.load_stills(footage.default_clip()))
    model = predictor.make_predictor(0)
    for block in model.blocks:
        torch.nn.init.xavier_uniform_(block.mixer.out_proj_cam.weight)
    assert stream.compare_stream(model, views).holds
    whole = model.stream

    def forgetful(frames, camera, asked, states):
        return whole(frames, camera, asked, model.init_states(len(frames)))

    monkeypatch.setattr(model, "stream", forgetful)
    assert not stream.compare_stream(model, views).holds


def test_the_model_learns_to_look_where_the_camera_looks():
    """On stills and paths it has not seen: 9 to 15 percent less error with the right camera, with three seeds."""
    stills = scene.load_stills(footage.default_clip())
    done = training.train(stills, proof.Settings(steps=100), torch.device("cpu"), None, "one")
    model = predictor.make_predictor(0)
    model.load_state_dict(done.weights)
    found = stream.errors(model, training.evaluation_views(stills))
    assert found.right < found.repeated
    assert found.right < 0.97 * found.other
    (left, left_at_right), (right_at_left, right) = stream.fork_errors(
        stream.fork(model, training.unseen_stills(stills))
    )
    assert left < 0.97 * right_at_left  # what is to the left: frames streamed to the left are nearer to it
    assert right < 0.97 * left_at_right
