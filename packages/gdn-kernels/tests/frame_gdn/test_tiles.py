"""Every launch shape fits the device it was chosen for, or the choice refuses and says by how much."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from gdn_kernels.frame_gdn import tiles
from gdn_kernels.types import Precision

LIMITS_KB = (48, 64, 99, 163, 227)
WIDTHS = (1, 8, 16, 24, 32, 64, 72, 96, 112, 128, 136, 160, 192, 256)
OPERAND_BYTES = (2, 4)
EVERY_KERNEL = pytest.mark.parametrize("kernel", tiles.KERNELS)


def choice(kernel: str, width: int, operand_bytes: int, limit_kb: int) -> tiles.LaunchShape | str:
    """Return the shape chosen, or the text of the refusal."""
    try:
        return tiles.choose(kernel, width, operand_bytes, limit_kb * 1024)
    except NotImplementedError as error:
        return str(error)


@pytest.mark.parametrize("limit_kb", LIMITS_KB)
@EVERY_KERNEL
def test_choice_fits_the_limit_and_covers_the_width_or_says_what_is_missing(kernel: str, limit_kb: int) -> None:
    chosen = 0
    for width, operand_bytes in itertools.product(WIDTHS, OPERAND_BYTES):
        found = choice(kernel, width, operand_bytes, limit_kb)
        if isinstance(found, str):
            pattern = rf'{kernel} at D = {width} needs (\d+) bytes .* offers (\d+); use impl="torch"'
            message = re.fullmatch(pattern, found)
            assert message, found
            needed, offered = map(int, message.groups())
            assert needed > offered == limit_kb * 1024
        else:
            chosen += 1
            assert tiles.shared_estimate(kernel, found, operand_bytes) <= limit_kb * 1024
            assert found.block_d * found.num_blocks >= width
            assert found.block_d * (found.num_blocks - 1) < width  # no block is empty
    assert chosen


@pytest.mark.parametrize("operand_bytes", OPERAND_BYTES)
@pytest.mark.parametrize("width", WIDTHS)
@EVERY_KERNEL
def test_more_shared_memory_never_takes_a_later_row(kernel: str, width: int, operand_bytes: int) -> None:
    unlimited = tiles.choose(kernel, width, operand_bytes, 1 << 30)
    found = [choice(kernel, width, operand_bytes, limit) for limit in LIMITS_KB]
    present = [isinstance(shape, tiles.LaunchShape) for shape in found]
    assert present == sorted(present)
    if unlimited in found:
        assert all(shape == unlimited for shape in found[found.index(unlimited) :])


@pytest.mark.parametrize("width", WIDTHS)
def test_device_of_227_kb_runs_every_kernel_at_every_width(width: int) -> None:
    for kernel in tiles.KERNELS:
        for operand_bytes in OPERAND_BYTES:
            shape = tiles.choose(kernel, width, operand_bytes, 227 * 1024)
            assert shape.num_warps in (1, 2, 4, 8, 16)
            assert shape.num_stages >= 1


@pytest.mark.parametrize("width", [width for width in WIDTHS if width <= 64])
def test_device_of_48_kb_runs_every_kernel_up_to_64_channels_in_bf16(width: int) -> None:
    for kernel in tiles.KERNELS:
        assert tiles.choose(kernel, width, 2, 48 * 1024)


@pytest.mark.parametrize("width", WIDTHS)
@EVERY_KERNEL
def test_blocks_are_powers_of_two_that_a_product_accepts(kernel: str, width: int) -> None:
    for operand_bytes in OPERAND_BYTES:
        shape = tiles.choose(kernel, width, operand_bytes, 1 << 30)
        for size in (shape.block_s, shape.block_d, shape.block_v):
            assert size == 0 or (size >= 16 and size & (size - 1) == 0)


def test_width_above_the_limit_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"supports D up to 256, got D = 264; use impl=\"torch\""):
        tiles.choose("phase_a", 264, 2, 227 * 1024)


def test_precision_picks_the_rows_of_its_operand_size() -> None:
    device = torch.device("cpu")
    for precision, operand_bytes in ((Precision.BF16, 2), (Precision.TF32, 4), (Precision.IEEE, 4)):
        expected = tiles.choose("phase_a", 112, operand_bytes, tiles.shared_memory(device))
        assert tiles.launch_shape("phase_a", 112, precision, device) == expected


def test_device_without_a_known_limit_gets_what_every_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    tiles.shared_memory.cache_clear()
    try:
        assert tiles.shared_memory(torch.device("cuda", 7)) == 48 * 1024
    finally:
        tiles.shared_memory.cache_clear()


def test_registers_are_limited_only_where_a_row_says_so() -> None:
    free = tiles.LaunchShape(64, 128, 1, 0, 8, 3, 0)
    assert free.options() == {"num_warps": 8}
    if torch.version.hip is None:
        assert free._replace(registers=128).options() == {"num_warps": 8, "maxnreg": 128}


def test_short_clips_share_frames_until_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_multiprocessors", lambda device: 100)
    shape, device = tiles.LaunchShape(64, 128, 1, 0, 8, 3, 0), torch.device("cuda", 0)
    assert tiles.token_shares(1000, 640, shape, device) == 1
    assert tiles.token_shares(50, 640, shape, device) == 4  # 4 x 50 programs for two on each of 100
    assert tiles.token_shares(1, 640, shape, device) == 10  # never more than there are tiles
    assert tiles.token_shares(0, 0, shape, device) == 1
