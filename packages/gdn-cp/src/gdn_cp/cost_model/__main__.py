"""The table of predicted times and choices, for assumed links or, under torchrun, for the one between its ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from gdn_cp import collectives
from gdn_cp.context import CPContext
from gdn_cp.cost_model import LINKS, SCHEDULES, Link, choose_schedule, measure_link, message_bytes, predict


def table(links: Sequence[Link], sizes: Sequence[int], width: int, heads: int, batch: int = 1) -> str:
    """Return predicted microseconds, all_gather / chain / doubling, and the choice, per link and number of ranks."""
    transition, state = message_bytes(width, heads, batch=batch)
    rows = [f"microseconds: all_gather / chain / doubling -> auto (B={batch}, H={heads}, D={width}, both directions)"]
    for link in links:
        rows.append(
            f"{link.name}: {link.latency:.1f} us per message, {link.bandwidth:.2f} GB/s; us per map: fold "
            f"{link.fold:.1f}, compose {link.compose:.1f}, advance {link.advance:.1f}"
        )
        for size in sizes:
            times = [predict(name, size, transition, state, link) for name in SCHEDULES]
            choice = choose_schedule(size, transition, state, link)
            rows.append(f"  P = {size:3d}   {' / '.join(f'{t:.0f}' for t in times)} -> {choice}")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; started by torchrun, for the link between the ranks it started."""
    parser = argparse.ArgumentParser(prog="python -m gdn_cp.cost_model", description=main.__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--width", type=int, default=112, help="head dim D")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="numbers of ranks P")
    given = parser.parse_args(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        print(table(list(LINKS.values()), given.sizes, given.width, given.heads, given.batch))
        return
    with collectives.world_of_environment() as (group, device):
        context = CPContext(group)
        link = measure_link(context, device, width=given.width, heads=given.heads, batch=given.batch)
        if context.rank == 0:
            print(table([link], given.sizes, given.width, given.heads, given.batch))


if __name__ == "__main__":
    main()
