"""Rotary tables against their definition, and the rotation against multiplication by complex numbers."""

import math

import pytest
import torch
from agreement import assert_close, assert_same

from gdn_kernels import RotaryTables, camera_rotary_tables, rotary_tables
from gdn_kernels.rope import axis_widths, rotate


@pytest.mark.parametrize("width", [2, 4, 6, 8, 10, 12, 16, 40, 64, 72, 112, 128, 256])
def test_axis_widths_share_the_head_in_even_parts(width: int) -> None:
    frame, row, column = axis_widths(width)
    assert frame + row + column == width
    assert row == column == 2 * (width // 6)
    assert frame % 2 == row % 2 == 0
    assert frame >= row


@pytest.mark.parametrize("width", [0, -2, 1, 9])
def test_odd_widths_are_refused(width: int) -> None:
    for make in (axis_widths, lambda d: rotary_tables((1, 1, 1), d)):
        with pytest.raises(ValueError, match=f"^head_dim must be a positive even number, got {width}$"):
            make(width)


@pytest.mark.parametrize("grid", [(-1, 2, 2), (2, 2), (2, 2, 2, 2), (2, 2, -3)])
def test_grids_that_are_no_three_sizes_are_refused(grid: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="^grid must be three sizes >= 0, got"):
        rotary_tables(grid, 8)


@pytest.mark.parametrize("theta", [0.0, -1.0, math.inf])
def test_theta_must_be_positive(theta: float) -> None:
    with pytest.raises(ValueError, match="^theta must be a finite number > 0, got"):
        rotary_tables((1, 1, 1), 8, theta=theta)


@pytest.mark.parametrize("theta", [1e4, 100.0])
@pytest.mark.parametrize("offset", [0, 5, 100_000])
def test_tables_are_position_times_frequency_of_each_axis(offset: int, theta: float) -> None:
    """Token by token in double precision; fp32 storage costs half a unit in the last place, at any position."""
    grid, width = (2, 3, 4), 20
    tables = rotary_tables(grid, width, theta=theta, frame_offset=offset)
    assert tables.cos.dtype == tables.sin.dtype == torch.float32
    n = 0
    for f in range(grid[0]):
        for y in range(grid[1]):
            for x in range(grid[2]):
                angles = []
                for position, channels in zip((offset + f, y, x), (8, 6, 6)):
                    angles += [position * theta ** (-2 * i / channels) for i in range(channels // 2)]
                for pair, angle in enumerate(angles):
                    assert abs(tables.cos[n, pair].item() - math.cos(angle)) < 2**-24
                    assert abs(tables.sin[n, pair].item() - math.sin(angle)) < 2**-24
                n += 1
    assert tables.cos.shape == (n, width // 2)


def test_offset_continues_a_longer_clip() -> None:
    whole = rotary_tables((7, 2, 3), 12)
    for a, b in ((0, 3), (3, 7), (5, 5)):
        part = rotary_tables((b - a, 2, 3), 12, frame_offset=a)
        assert_same(part.cos, whole.cos[6 * a : 6 * b])
        assert_same(part.sin, whole.sin[6 * a : 6 * b])


@pytest.mark.parametrize("grid", [(0, 2, 3), (2, 0, 3), (1, 1, 1)])
def test_empty_and_single_grids(grid: tuple[int, int, int]) -> None:
    tables = rotary_tables(grid, 2)
    assert tables.cos.shape == tables.sin.shape == (math.prod(grid), 1)


def test_rotation_multiplies_pairs_by_unit_complex_numbers_and_back() -> None:
    angle = 6 * torch.rand(5, 4, dtype=torch.float64)
    tables, x = RotaryTables(angle.cos(), angle.sin()), torch.randn(2, 5, 3, 8, dtype=torch.float64)
    y = rotate(x, tables)
    numbers = torch.complex(x[..., ::2], x[..., 1::2]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    assert_close(y, torch.view_as_real(numbers).flatten(-2), 1e-15)
    assert_close(rotate(y, tables, inverse=True), x, 1e-15)


def test_inverse_rotation_is_the_adjoint() -> None:
    tables = rotary_tables((1, 2, 3), 8)
    x, y = torch.randn(2, 6, 3, 8, dtype=torch.float64)
    one, other = (rotate(x, tables) * y).sum(), (x * rotate(y, tables, inverse=True)).sum()
    assert_close(one, other, 1e-14)


def test_rotation_by_positions_depends_on_differences_only() -> None:
    """The product of a rotated query and key moves with neither when both positions move."""
    q, k = torch.randn(2, 3, 1, 8, dtype=torch.float64)
    products = []
    for offset in (0, 11):
        tables = rotary_tables((3, 1, 1), 8, frame_offset=offset)
        products.append(rotate(q, tables)[:, 0] @ rotate(k, tables)[:, 0].mT)
    assert_close(products[1], products[0], 16 * 2**-24)


@pytest.mark.parametrize(
    ("width", "pairs"), [(8, (2, 0, 0)), (16, (2, 1, 1)), (32, (4, 2, 2)), (112, (10, 9, 9)), (128, (12, 10, 10))]
)
def test_camera_tables_are_the_leading_pairs_of_every_axis(width: int, pairs: tuple[int, int, int]) -> None:
    tables = rotary_tables((2, 3, 4), width, frame_offset=5)
    found, position = camera_rotary_tables(tables), [1 + 5, 2, 3]
    assert sum(pairs) == width // 4
    owned = (width - 4 * (width // 6), 2 * (width // 6), 2 * (width // 6))
    expected = [
        position[axis] * 1e4 ** (-2 * i / owned[axis]) for axis, count in enumerate(pairs) for i in range(count)
    ]  # of the last token
    for table, function in zip(found, (math.cos, math.sin), strict=True):
        assert table.shape == (24, width // 4)
        assert table.dtype == torch.float32
        assert max(abs(a - function(b)) for a, b in zip(table[-1].tolist(), expected, strict=True)) < 2**-24


@pytest.mark.parametrize("width", [4, 12, 20])
def test_camera_tables_need_a_multiple_of_eight(width: int) -> None:
    with pytest.raises(ValueError, match=f"^the camera branch needs D to be a multiple of 8, got D = {width}$"):
        camera_rotary_tables(rotary_tables((1, 1, 1), width))
