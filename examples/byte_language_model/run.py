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

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # what the demos share
from proof import Run, Settings, at_least_one, compare, on_ranks, require_writable, share_cores, table  # noqa: E402
from text import load_text  # noqa: E402
from train import TOKENS, bits_per_byte, share_of, train  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=at_least_one, help="processes that share the tokens (default: GPUs, or 2)")
    parser.add_argument("--steps", type=at_least_one, default=100, help="training steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo-out/language_model.png"), help="picture (%(default)s)")
    parser.add_argument("--break-it", action="store_true", help="leave out a sum over ranks, to see the proof fail")
    return parser.parse_args(arguments)


def draw(path: Path, one: Run, ranks: Run, size: int) -> None:
    """Write the picture: loss curves on top of each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(one.losses, color="tab:blue", linewidth=4, alpha=0.4, label="one process")
    axes.plot(ranks.losses, color="black", linewidth=1, linestyle="--", label=f"{size} ranks")
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
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
    devices = torch.cuda.device_count()
    size = options.ranks or max(2, devices)
    on_cuda = devices >= 2 and size <= devices
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    share_cores(1)
    text = load_text()
    one = train(text, Settings(options.steps), device, None, "one process")
    drifted = train(text, Settings(options.steps, nudge=1 + 2.0**-23), device, None, "one rounding away")
    settings = Settings(options.steps, sum_gradients=not options.break_it)
    ranks = on_ranks(size, on_cuda, train, text, settings)
    lines = compare(one, ranks, drifted)
    where = f"{size} ranks over {'NCCL, a GPU each' if on_cuda else 'gloo on the CPU'}"
    title = (
        f"{len(text.bounds) - 1} pages, {len(text.tokens):,} bytes; {options.steps} steps of {TOKENS} tokens, "
        f"{where}, tokens of each {share_of(size).counts}"
    )
    bits = (
        f"  another batch of it    {bits_per_byte(one, text):.3f} bits per byte (one process), "
        f"{bits_per_byte(ranks, text):.3f} (ranks)"
    )
    agree = all(line.holds for line in lines)
    print(f"\n{table(title, one, ranks, size, lines, [bits])}\n")
    draw(options.out, one, ranks, size)
    print(f"picture: {options.out}\n{'one process and ranks agree' if agree else 'one process and ranks DISAGREE'}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
