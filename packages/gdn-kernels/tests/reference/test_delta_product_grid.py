"""The chunk grid: every token has one slot, the scan meets chunks in order, and streams come back as they went in."""

import itertools

import pytest
import torch
from agreement import assert_same

from gdn_kernels.reference.delta_product_grid import chunk_grid, scan_plan

LENGTHS = [(), (0,), (5,), (4, 4), (3, 0, 8, 1), (0, 9, 2, 9, 0), (1, 1, 1)]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_scan_meets_every_chunk_once_and_in_order(lengths: tuple[int, ...], chunk_tokens: int) -> None:
    grid = chunk_grid(lengths, chunk_tokens)
    starts = [0, *itertools.accumulate(lengths)]
    slots = grid.tokens.reshape(-1, chunk_tokens).tolist()
    real = torch.ones_like(grid.tokens, dtype=torch.bool) if grid.padding is None else ~grid.padding
    seen: list[list[int]] = [[] for _ in lengths]
    for part in grid.plan.steps:
        chunks = range(part.start, part.stop)
        for fragment, x in zip(grid.plan.order.tolist()[: len(chunks)], chunks, strict=True):
            mask = real.reshape(-1, chunk_tokens)[x].tolist()
            seen[fragment] += [token for token, is_real in zip(slots[x], mask, strict=True) if is_real]
    assert seen == [list(range(a, b)) for a, b in zip(starts, starts[1:], strict=False)]
    assert len(slots) == grid.plan.chunks == sum(-(-length // chunk_tokens) for length in lengths)
    assert grid.plan.order[grid.plan.position].tolist() == list(range(len(lengths)))
    assert_same(grid.tokens[grid.slots], torch.arange(starts[-1]))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_streams_come_back_and_padding_is_zero(lengths: tuple[int, ...], rows: int) -> None:
    grid = chunk_grid(lengths, 4)
    stream = torch.randn(1, sum(lengths) * rows, 2, 5, dtype=torch.bfloat16)
    chunks = grid.to_chunks(stream, rows, torch.float32)
    assert chunks.shape == (grid.plan.chunks, 2, 4 * rows, 5)
    assert chunks.is_contiguous()
    assert_same(grid.to_stream(chunks, stream.shape, stream.dtype), stream)
    assert int((chunks != 0).any(-1).sum()) == 2 * sum(lengths) * rows


def test_batch_rows_are_fragments_and_padding_hides_what_token_0_holds() -> None:
    stream = torch.randn(2, 5, 3, 4).transpose(2, 3)
    stream[0, 0] = torch.nan
    grid = chunk_grid([5, 5], 3)
    chunks = grid.to_chunks(stream, 1, torch.float32)
    assert_same(chunks[1], stream[1, :3].transpose(0, 1).contiguous())  # first chunks first
    assert_same(chunks[2, :, 2], torch.zeros(4, 3))
    assert_same(grid.to_stream(chunks, stream.shape, stream.dtype), stream)


@pytest.mark.parametrize("chosen", [(), (2,), (0,), (1, 2), (3, 0, 1)])
def test_select_finds_the_chunks_of_fragments(chosen: tuple[int, ...]) -> None:
    plan = scan_plan([2, 0, 3, 1])
    owner = torch.empty(plan.chunks, 2, dtype=torch.int64)  # fragment, chunk
    for step, part in enumerate(plan.steps):
        owner[part, 0], owner[part, 1] = plan.order[: part.stop - part.start], step
    part_plan, chunks = plan.select(chosen)
    assert part_plan.counts == tuple(plan.counts[fragment] for fragment in chosen)
    for step, part in enumerate(part_plan.steps):
        fragments = [chosen[i] for i in part_plan.order[: part.stop - part.start]]
        assert owner[chunks[part]].tolist() == [[fragment, step] for fragment in fragments]
