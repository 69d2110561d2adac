"""The proof: a table of differences with their tolerances, and one picture."""

from __future__ import annotations

import math
from pathlib import Path

from clip import Clip, to_frames
from proof import Run, compare, draw_losses, table
from torch import Tensor
from train import evaluation_noise


def report(clip: Clip, one: Run, ranks: Run, nudged: Run, size: int, device: str) -> tuple[str, bool]:
    """Return the text of the report, and whether every comparison holds."""
    lines = compare(one, ranks, nudged)
    noisy = clip.tokens + evaluation_noise(clip.tokens)
    ratio = (
        f"  PSNR   noisy {psnr(noisy, clip.tokens):.2f} dB, denoised {psnr(one.final, clip.tokens):.2f} dB "
        f"(one process), {psnr(ranks.final, clip.tokens):.2f} dB (ranks)"
    )
    title = f"{clip.name}: {clip.tokens.shape[1]} tokens, {len(one.losses)} steps, {device}"
    return table(title, one, ranks, size, lines, [ratio]), all(line.holds for line in lines)


def psnr(found: Tensor, clean: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB of values in [-1, 1]."""
    return 10 * math.log10(4.0 / float((found - clean).square().mean()))


def draw(path: Path, clip: Clip, one: Run, ranks: Run, size: int) -> None:
    """Write the picture: the clip, noisy, denoised by both, and the loss curves on top of each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    noisy = clip.tokens + evaluation_noise(clip.tokens)
    rows = {
        "clip": clip.tokens, f"noisy\n{psnr(noisy, clip.tokens):.1f} dB": noisy,
        f"one process\n{psnr(one.final, clip.tokens):.1f} dB": one.final,
        f"{size} ranks\n{psnr(ranks.final, clip.tokens):.1f} dB": ranks.final,
    }  # fmt: skip
    shown = [0, 3, 6, 9, 12]
    figure = plt.figure(figsize=(10, 8.4), layout="constrained")
    grid = figure.add_gridspec(len(rows) + 1, len(shown), height_ratios=[1] * len(rows) + [1.5])
    for i, (label, tokens) in enumerate(rows.items()):
        frames = to_frames(tokens)
        for j, frame in enumerate(shown):
            axes = figure.add_subplot(grid[i, j])
            axes.imshow(frames[frame].numpy())
            axes.set_xticks([])
            axes.set_yticks([])
            if j == 0:
                axes.set_ylabel(label)
            if i == 0:
                axes.set_title(f"frame {frame}", fontsize=9)
    axes = figure.add_subplot(grid[len(rows), :])
    draw_losses(axes, one, ranks, size, ylabel="mean squared error", yscale="log")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
