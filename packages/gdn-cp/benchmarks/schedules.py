"""Predict how long the exchange of one forward pass takes, for three kinds of link: a table, JSON, and a plot.

    python schedules.py
    python schedules.py --heads 32 --width 128 --json schedules.json --png schedules.png

Nothing is timed: `gdn_cp.cost_model` holds the model and what it assumes of the links. To measure a link of your own,
run ``torchrun --nproc-per-node 2 -m gdn_cp.cost_model``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdn_cp.cost_model import LINKS, SCHEDULES, Link, chain_blocks, choose_schedule, message_bytes, predict

Row = dict[str, Any]
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
STYLES = {"all_gather": ("C0", "o"), "chain": ("C1", "s"), "doubling": ("C2", "^")}


def rows_of(links: Sequence[Link], sizes: Sequence[int], transition: int, state: int) -> list[Row]:
    """Return one row per link and number of ranks: microseconds of each schedule, and what auto takes."""
    return [
        {
            "link": link.name,
            "ranks": size,
            **{name: predict(name, size, transition, state, link) for name in SCHEDULES},
            "blocks": chain_blocks(size, state, link),
            "auto": choose_schedule(size, transition, state, link),
        }
        for link in links
        for size in sizes
    ]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, microseconds."""
    lines = [f"| link | P | {' | '.join(SCHEDULES)} | auto |", "| --- | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        times = " | ".join(f"{row[name]:.0f}" for name in SCHEDULES)
        lines.append(f"| {row['link']} | {row['ranks']} | {times} | {row['auto']} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], links: Sequence[Link], path: Path) -> None:
    """Plot the times against the number of ranks, a panel per link; a ring marks what auto takes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(links), figsize=(4 * len(links), 4), sharey=True, layout="constrained")
    for link, panel in zip(links, panels, strict=True):
        own = [row for row in rows if row["link"] == link.name]
        sizes = [row["ranks"] for row in own]
        for name, (colour, marker) in STYLES.items():
            panel.plot(sizes, [row[name] for row in own], color=colour, marker=marker, markersize=4, label=name)
        panel.plot(
            sizes, [row[row["auto"]] for row in own], "o", markersize=11, fillstyle="none", color="0.3", label="auto"
        )
        panel.set(xscale="log", yscale="log", xlabel="ranks P")
        panel.set_title(f"{link.name}: {link.latency:g} us, {link.bandwidth:g} GB/s (assumed)", fontsize=10)
        panel.set_xticks([2, 4, 8, 16, 32, 64], labels=["2", "4", "8", "16", "32", "64"])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("predicted microseconds, forward exchange")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table, write what was asked for, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--width", type=int, default=112, help="head dim D")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args(arguments)
    transition, state = message_bytes(options.width, options.heads, batch=options.batch)
    links = list(LINKS.values())
    rows = rows_of(links, SIZES, transition, state)
    print(table(rows))
    if options.json:
        about = {
            "predicted": True, "batch": options.batch, "heads": options.heads, "width": options.width,
            "transition_bytes": transition, "state_bytes": state, "links": [dataclasses.asdict(x) for x in links],
        }  # fmt: skip
        options.json.write_text(json.dumps({"model": about, "rows": rows}, indent=2) + "\n")
    if options.png:
        draw(rows, links, options.png)
    return rows


if __name__ == "__main__":
    main()
