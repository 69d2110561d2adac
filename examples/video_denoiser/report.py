"""The proof: a table of differences with their tolerances, and one picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from clip import Clip, to_frames
from torch import Tensor
from train import Run, evaluation_noise

OUTPUT_TOLERANCE = 1e-5  # fp32 rounds at 6e-8; sums of a few hundred terms over three blocks stay below 100 roundings
GRADIENT_TOLERANCE = 3e-4  # a gradient sums over all 1248 tokens, with cancellation: a few thousand roundings
DRIFT_FACTOR = 10.0  # ranks may drift ten times as far as a run whose input was moved by one rounding ...
DRIFT_FLOOR, DRIFT_CEILING = 1e-5, 2e-2  # ... which counts as no less, and a proof allows no more, than this


class Line(NamedTuple):
    """One comparison of the table."""

    what: str
    difference: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.difference <= self.tolerance


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm expected; inf where something is not finite."""
    if not expected.norm() > 0:
        return float(found.norm())
    difference = float((found.double() - expected.double()).norm() / expected.double().norm())
    return difference if math.isfinite(difference) else math.inf


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[str, float]:
    """Return the parameter that differs most, relative to the largest of its kind, and by how much."""
    scale = max(float(x.norm()) for x in expected.values())
    differences = {
        name: float((found[name].double() - x.double()).norm()) / max(float(x.norm()), 1e-3 * scale)
        for name, x in expected.items()
    }
    name = max(differences, key=lambda key: differences[key] if math.isfinite(differences[key]) else math.inf)
    return name, differences[name] if math.isfinite(differences[name]) else math.inf


def compare(one: Run, ranks: Run, nudged: Run) -> list[Line]:
    """Hold the run on ranks to the one on one process; the nudged run says how far rounding alone drifts."""
    name, gradient = worst(ranks.gradients, one.gradients)
    lines = [
        Line("output of the first step", relative(ranks.output, one.output), OUTPUT_TOLERANCE),
        Line(f"gradients of the first step (worst: {name})", gradient, GRADIENT_TOLERANCE),
    ]
    name, weights = worst(ranks.weights, one.weights)
    for what, difference, drift in (
        (f"final weights (worst: {name})", weights, worst(nudged.weights, one.weights)[1]),
        ("final output", relative(ranks.denoised, one.denoised), relative(nudged.denoised, one.denoised)),
        ("losses", relative(torch.tensor(ranks.losses), torch.tensor(one.losses)),
         relative(torch.tensor(nudged.losses), torch.tensor(one.losses))),
    ):  # fmt: skip
        lines.append(Line(what, difference, min(DRIFT_CEILING, max(DRIFT_FLOOR, DRIFT_FACTOR * drift))))
    return lines


def psnr(found: Tensor, clean: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB of values in [-1, 1]."""
    return 10 * math.log10(4.0 / float((found - clean).square().mean()))


def table(clip: Clip, one: Run, ranks: Run, nudged: Run, size: int, device: str) -> tuple[str, bool]:
    """Return the text of the report, and whether every comparison holds."""
    steps = len(one.losses)
    every = max(1, steps // 8)
    shown = sorted({*range(0, steps, every), steps - 1})
    text = [f"{clip.name}: {clip.tokens.shape[1]} tokens, {steps} steps, {device}", "", "  step   one process   ranks"]
    text += [f"  {i:4d}   {one.losses[i]:11.6f}   {ranks.losses[i]:11.6f}" for i in shown]
    noisy = clip.tokens + evaluation_noise(clip.tokens)
    text += [
        "",
        f"  PSNR   noisy {psnr(noisy, clip.tokens):.2f} dB, denoised {psnr(one.denoised, clip.tokens):.2f} dB "
        f"(one process), {psnr(ranks.denoised, clip.tokens):.2f} dB (ranks)",
        f"  time   {one.seconds:.1f} s (one process), {ranks.seconds:.1f} s ({size} ranks)",
        "",
        "  exchange of one step, per rank              number    bytes each",
    ]
    for label in dict.fromkeys(ranks.labels):
        sent = [n for name, n in zip(ranks.labels, ranks.sent, strict=True) if name == label]
        text.append(f"  {label:42s}  {len(sent):6d}  {max(sent):12,d}")
    text += ["", "  largest relative difference", ""]
    lines = compare(one, ranks, nudged)
    for line in lines:
        text.append(
            f"  {line.what:72s} {line.difference:9.2e}  <= {line.tolerance:.1e}  {'yes' if line.holds else 'NO'}"
        )
    text += [
        "",
        f"  Tolerances of the end of training are {DRIFT_FACTOR:g} times the drift of a third run, on one process,",
        "  whose clip was moved by one fp32 rounding; those of the first step follow from fp32 and the sums.",
    ]
    return "\n".join(text), all(line.holds for line in lines)


def draw(path: Path, clip: Clip, one: Run, ranks: Run, size: int) -> None:
    """Write the picture: the clip, noisy, denoised by both, and the loss curves on top of each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    noisy = clip.tokens + evaluation_noise(clip.tokens)
    rows = {
        "clip": clip.tokens, f"noisy\n{psnr(noisy, clip.tokens):.1f} dB": noisy,
        f"one process\n{psnr(one.denoised, clip.tokens):.1f} dB": one.denoised,
        f"{size} ranks\n{psnr(ranks.denoised, clip.tokens):.1f} dB": ranks.denoised,
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
    axes.plot(one.losses, color="tab:blue", linewidth=4, alpha=0.4, label="one process")
    axes.plot(ranks.losses, color="black", linewidth=1, linestyle="--", label=f"{size} ranks")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("mean squared error")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
