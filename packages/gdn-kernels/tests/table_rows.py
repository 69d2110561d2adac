"""Run with a row of the launch table that would not be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gdn_kernels.frame_gdn import tiles

MOST_ROWS = max(len(rows) for by_bytes in tiles.TABLE.values() for rows in by_bytes.values())


@contextmanager
def row_first(row: int) -> Iterator[None]:
    """Put row number ``row`` (counted around) of every kernel first; the others follow where it does not fit."""
    table = {kernel: dict(by_bytes) for kernel, by_bytes in tiles.TABLE.items()}
    try:
        for kernel, by_bytes in table.items():
            for operand_bytes, rows in by_bytes.items():
                first = row % len(rows)
                tiles.TABLE[kernel][operand_bytes] = rows[first:] + rows[:first]
        tiles.choose.cache_clear()
        yield
    finally:
        tiles.TABLE.update(table)
        tiles.choose.cache_clear()
