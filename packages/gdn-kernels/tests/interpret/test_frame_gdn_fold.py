"""The fold of affine summaries, in the interpreter, against products in fp64."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_close
from requirements import require_interpreter
from torch import Tensor

require_interpreter()
from gdn_kernels.frame_gdn.fold import FoldLine, fold, fold_lines  # noqa: E402

pytestmark = pytest.mark.interpret

P, B, H = 4, 1, 2
ORDERS = {
    "none": range(0), "one": range(2, 3), "forward": range(P), "down to 1": range(P - 1, 0, -1),
    "down to 0": range(P - 1, -1, -1),
}  # fmt: skip


def sequential(
    e: Tensor, h: Tensor, start: Tensor | None, order: range, transposed: bool, dropped: tuple[int, ...]
) -> Tensor:
    h = h if h.ndim == 5 else h[..., None]
    x = torch.zeros_like(h[0]) if start is None else start.double().reshape(h[0].shape)
    states = [x]
    for r in order:
        factor = e[r].mT if transposed else e[r]
        x = h[r] if r in dropped else factor @ x + h[r]
        states.append(x)
    return torch.stack(states)


def maps(width: int, *columns: int) -> tuple[Tensor, Tensor]:
    """Return transitions that need not contract, and increments, as views into one buffer per map."""
    size = B * H * width
    square, increment = size * width, size * (columns[0] if columns else 1)
    buffer = torch.randn(P, square + increment + 4)
    transitions = buffer[:, :square].view(P, B, H, width, width)
    transitions /= 1.5 * width**0.5
    return transitions, buffer[:, square + 4 :].view(P, B, H, width, *columns)


@pytest.mark.parametrize("dropped", [(), (1, 3)], ids=["kept", "dropped"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("columns", [(), (8,)], ids=["vector", "matrix"])
def test_fold_gives_the_states_between_all_maps(
    columns: tuple[int, ...], order: range, transposed: bool, dropped: tuple[int, ...]
) -> None:
    e, h = maps(8, *columns)
    start = torch.randn(h.shape[1:])
    found = fold(e, h, start, order, transposed=transposed, dropped=dropped)
    assert found.shape == (len(order) + 1, *h.shape[1:])
    exact = sequential(e.double(), h.double(), start, order, transposed, dropped).reshape(found.shape)
    # four products over 8 channels, each rounded once per term
    assert_close(found, exact, 4 * 8 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("width", [32, 40])
def test_fold_of_wide_states_starts_from_zero(width: int) -> None:
    """Several row and column blocks; 40 fills neither."""
    e, h = maps(width, width)
    found = fold(e, h, None, range(P))
    exact = sequential(e.double(), h.double(), None, range(P), False, ())
    assert_close(found, exact, 4 * width * torch.finfo(torch.float32).eps)


def test_fold_reads_no_map_outside_the_order_and_no_dropped_transition() -> None:
    """Slots that nobody may read can hold anything: a rank fills them with NaN when it checks for that."""
    e, h = maps(8, 8)
    e[0], h[0], e[2] = torch.nan, torch.nan, torch.nan
    found = fold(e, h, None, range(1, P), dropped=(2,))
    assert found.isfinite().all()


def test_fold_without_heads_is_empty() -> None:
    e, h = maps(8, 8)
    assert fold(e[:, :0], h[:, :0], None, range(P)).shape == (P + 1, 0, H, 8, 8)


@pytest.mark.parametrize("count", [1, 2], ids=["one line", "two lines"])
@pytest.mark.parametrize("width", [8, 40])
def test_lines_of_both_streams_are_the_same_folds(width: int, count: int) -> None:
    """Lines of unlike length, direction, starts and dropped maps in one launch; 40 leaves column blocks part empty."""
    (e, h), (e_z, h_z) = maps(width, width), maps(width)
    (_, back), (_, back_z) = maps(width, width), maps(width)
    start, start_z = torch.randn(h.shape[1:]), torch.randn(h_z.shape[1:])
    lines = [
        FoldLine((e, e_z), (h, h_z), (start, None), range(P)),
        FoldLine((e, e_z), (back, back_z), (None, start_z), range(P - 1, 0, -1), transposed=True, dropped=(2,)),
    ][:count]
    for line, found in zip(lines, fold_lines(lines), strict=True):
        for x, factors, increments, first in zip(found, line.transitions, line.increments, line.starts, strict=True):
            exact = sequential(
                factors.double(), increments.double(), first, line.order, line.transposed, line.dropped
            ).reshape(x.shape)  # fmt: skip
            assert_close(x, exact, P * width * torch.finfo(torch.float32).eps)
            alone = fold(
                factors, increments, first, line.order, transposed=line.transposed, dropped=line.dropped
            )  # fmt: skip
            assert torch.equal(x, alone)
