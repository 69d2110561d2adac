"""The demo: it agrees, it notices when it does not, and it says what is wrong with a clip in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEMO = Path(__file__).parent.parent / "examples" / "video_denoiser"
sys.path[:0] = [str(DEMO), str(DEMO.parent)]

import clip  # noqa: E402  the folders above are on the path now
import footage  # noqa: E402
import proof  # noqa: E402
import train  # noqa: E402

pytestmark = pytest.mark.ranks


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_two_steps_on_two_ranks_agree_and_draw_the_picture(tmp_path):
    done = run("--steps", "2", "--out", str(tmp_path / "new" / "picture.png"))
    assert done.returncode == 0, done.stderr
    assert "one process and ranks agree" in done.stdout
    assert "cp_frame_gdn forward" in done.stdout
    assert (tmp_path / "new" / "picture.png").stat().st_size > 10_000


def test_more_ranks_than_frames_agree():
    tokens = clip.load_clip(footage.default_clip()).tokens
    settings = proof.Settings(steps=1)
    one = train.train(tokens, settings, torch.device("cpu"), None, "one")
    many = proof.on_ranks(clip.FRAMES + 1, False, train.train, tokens, settings)
    assert all(line.holds for line in proof.compare(one, many, one)[:2])


def test_a_missing_sum_of_gradients_is_noticed():
    """The proof can fail: without the sum over ranks, gradients and weights differ."""
    tokens = clip.load_clip(footage.default_clip()).tokens
    one = train.train(tokens, proof.Settings(steps=2), torch.device("cpu"), None, "one")
    broken = proof.on_ranks(2, False, train.train, tokens, proof.Settings(steps=2, sum_gradients=False))
    output, gradients, weights, *_ = proof.compare(one, broken, one)
    assert output.holds
    assert not gradients.holds
    assert not weights.holds


def test_a_proof_that_fails_is_exit_status_1(tmp_path):
    done = run("--steps", "2", "--break-it", "--out", str(tmp_path / "picture.png"))
    assert done.returncode == 1, done.stderr
    assert "one process and ranks DISAGREE" in done.stdout
    assert "  NO" in done.stdout


def test_a_picture_that_cannot_be_written_is_one_sentence_before_the_training(tmp_path):
    (tmp_path / "file").touch()
    done = run("--out", str(tmp_path / "file" / "picture.png"))
    assert done.returncode == 2
    (sentence,) = done.stderr.strip().splitlines()
    assert sentence.startswith(f"demo: cannot write {tmp_path / 'file' / 'picture.png'}: ")


def test_a_rank_that_fails_ends_the_run():
    with pytest.raises(Exception, match="'str' object has no attribute"):
        proof.on_ranks(2, False, train.train, "not a clip", proof.Settings(steps=1))


def test_a_nan_is_no_agreement():
    assert not proof.Line("losses", float("nan"), 1.0).holds


@pytest.mark.parametrize(
    ("content", "says"), [(None, "there is no file"), (b"not a video", "cannot be decoded as a video")]
)
def test_a_clip_that_cannot_be_used_is_one_sentence(tmp_path, content, says):
    path = tmp_path / "clip.mp4"
    if content is not None:
        path.write_bytes(content)
    done = run("--clip", str(path))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [("--ranks", "0"), ("--steps", "many")])
def test_counts_below_one_are_refused(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "must be a whole number >= 1" in done.stderr


def test_tokens_and_frames_are_inverse():
    frames = torch.rand(clip.FRAMES, clip.HEIGHT, clip.WIDTH, 3)
    assert torch.allclose(clip.to_frames(clip.to_tokens(frames * 2 - 1)), frames, atol=1e-6)
