"""Train a byte-level language model on one process and on several ranks, and prove that they agree.

    nox -s demo -- --model gdp                      this repository's documentation, two ranks
    nox -s demo -- --model gdp --ranks 3 --steps 60 --out curves.png

Documents are packed into one stream that is cut between ranks, so that sequences cross from one rank to the next. Exit
status: 0 if both runs agree, 1 if they do not, 2 if the picture cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # what the demos share
from proof import Run, compare, conclude, draw_losses, parser_of, place_of, prove, require_writable, table  # noqa: E402
from text import load_text  # noqa: E402
from train import TOKENS, bits_per_byte, share_of, train  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    return parser_of(__doc__, "tokens", 100, "language_model.png").parse_args(arguments)


def draw(path: Path, one: Run, ranks: Run, size: int) -> None:
    """Write the picture: loss curves on top of each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    draw_losses(axes, one, ranks, size, ylabel="nats per byte")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)
    try:
        require_writable(options.out)
    except OSError as error:
        print(f"demo: cannot write {options.out}: {error.strerror}", file=sys.stderr)
        return 2
    text, place = load_text(), place_of(options.ranks)
    one, ranks, drifted = prove(train, text, options, place, 2.0**-23)
    lines = compare(one, ranks, drifted)
    title = (
        f"{len(text.bounds) - 1} pages, {len(text.tokens):,} bytes; {options.steps} steps of {TOKENS} tokens, "
        f"{place}, tokens of each {share_of(place.size).counts}"
    )
    bits = (
        f"  another batch of it    {bits_per_byte(one, text):.3f} bits per byte (one process), "
        f"{bits_per_byte(ranks, text):.3f} (ranks)"
    )
    print(f"\n{table(title, one, ranks, place.size, lines, [bits])}\n")
    draw(options.out, one, ranks, place.size)
    return conclude(options.out, all(line.holds for line in lines))


if __name__ == "__main__":
    sys.exit(main())
