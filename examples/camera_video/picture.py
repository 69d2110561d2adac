"""What the demo shows: a table of differences with their tolerances, and one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proof import Run, draw_losses
from scene import to_frames
from stream import GIVEN, Errors, Fork, fork_errors
from training import FRAMES


def camera_lines(found: Errors, both: Fork) -> list[str]:
    """Return the lines of the report on what the camera changes."""
    (left_left, left_right), (right_left, right_right) = fork_errors(both)
    change = float((both.streamed_left - both.streamed_right)[:, GIVEN:].square().mean())
    return [
        "  mean squared error of the next frame, stills and paths not trained on",
        f"    the last frame again    {found.repeated:.4f}",
        f"    camera of the clip      {found.right:.4f}",
        f"    camera of another clip  {found.other:.4f}",
        "",
        f"  {FRAMES - GIVEN} frames streamed after {GIVEN} given ones        seen to the left    seen to the right",
        f"    camera goes left                     {left_left:17.4f}    {left_right:17.4f}",
        f"    camera goes right                    {right_left:17.4f}    {right_right:17.4f}",
        f"    one against the other                {change:17.4f}",
        "",
    ]


def draw(path: Path, both: Fork, shown: Sequence[int], one: Run, ranks: Run, size: int) -> None:
    """Write the picture: of some stills what is seen and what was streamed, both ways; and the loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [
        (label, to_frames(frames[still]), streamed)
        for still in shown
        for label, frames, streamed in (
            ("seen\nleft", both.left.tokens, False), ("streamed\nleft", both.streamed_left, True),
            ("seen\nright", both.right.tokens, False), ("streamed\nright", both.streamed_right, True),
        )
    ]  # fmt: skip
    figure = plt.figure(figsize=(9, 1.05 * len(rows) + 2), layout="constrained")
    grid = figure.add_gridspec(len(rows) + 1, FRAMES, height_ratios=[1.0] * len(rows) + [1.8])
    for i, (label, frames, streamed) in enumerate(rows):
        for j in range(FRAMES):
            axes = figure.add_subplot(grid[i, j])
            if streamed and j < GIVEN:
                axes.axis("off")
                if j == GIVEN - 1:
                    axes.text(0.5, 0.5, label, ha="center", va="center", transform=axes.transAxes)
                continue
            axes.imshow(frames[j].numpy())
            axes.set(xticks=[], yticks=[])
            if j == 0:
                axes.set_ylabel(label)
            if i == 0:
                axes.set_title(f"frame {j}, {'given' if j < GIVEN else 'to come'}", fontsize=9)
    axes = figure.add_subplot(grid[len(rows), :])
    draw_losses(axes, one, ranks, size, ylabel="mean squared error", yscale="log")
    figure.savefig(path, dpi=90)
    plt.close(figure)
