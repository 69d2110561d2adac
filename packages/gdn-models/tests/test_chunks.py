"""chunk_schedule and same_chunk: values from the definition, and every error."""

import pytest
import torch

from gdn_models import chunk_schedule
from gdn_models.chunks import CHUNK_MODES, same_chunk


@pytest.mark.parametrize(
    ("frames", "size", "mode", "starts"),
    [
        (21, 4, "uniform", (0, 4, 8, 12, 16)),
        (20, 4, "uniform", (0, 4, 8, 12, 16)),
        (3, 4, "uniform", (0,)),
        (3, 4, "first_frame", (0, 1)),
        (6, 4, "first_frame", (0, 1)),
        (9, 4, "first_frame", (0, 1, 5)),
        (121, 3, "first_plus_one", (0, *range(4, 119, 3))),
        (122, 3, "first_plus_one", (0, *range(4, 119, 3))),
        (4, 3, "first_plus_one", (0,)),
        (5, 3, "first_plus_one", (0,)),
        (7, 3, "first_plus_one", (0, 4)),
        (6, 1, "uniform", (0, 1, 2, 3, 4, 5)),
        (1, 3, "first_frame", (0,)),
        (0, 3, "uniform", ()),
    ],
)
def test_chunk_schedule_known_values(frames: int, size: int, mode: str, starts: tuple[int, ...]) -> None:
    assert chunk_schedule(frames, size, mode) == starts


@pytest.mark.parametrize("mode", CHUNK_MODES)
def test_chunk_schedule_leaves_no_short_chunk_but_the_first(mode: str) -> None:
    for frames in range(1, 40):
        for size in range(1, 8):
            starts = chunk_schedule(frames, size, mode)
            lengths = [stop - start for start, stop in zip(starts, (*starts[1:], frames), strict=True)]
            assert starts[0] == 0
            assert sum(lengths) == frames
            first = {"uniform": size, "first_frame": 1, "first_plus_one": size + 1}[mode]
            assert lengths[0] == first or len(starts) == 1
            assert all(length == size for length in lengths[1:-1])
            if len(lengths) > 1:
                least = 1 if mode == "first_frame" and len(lengths) == 2 else size
                assert least <= lengths[-1] < 2 * size


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 3), ValueError, r"num_frames must be >= 0, got -1"),
        ((5, 0), ValueError, r"size must be >= 1, got 0"),
        ((5, 3, "first"), ValueError, r"mode must be one of 'uniform', 'first_frame', 'first_plus_one', got 'first'"),
        ((5.0, 3), TypeError, r"num_frames must be an int, got float"),
        ((5, "3"), TypeError, r"size must be an int, got str"),
        ((5, 3, None), TypeError, r"mode must be a str, got NoneType"),
    ],
)
def test_chunk_schedule_errors(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chunk_schedule(*arguments)


@pytest.mark.parametrize("first", [0, 5, 64])
@pytest.mark.parametrize("starts", [(), (1,), (2, 3, 7, 31, 32, 33), tuple(range(1, 100, 3))])
def test_same_chunk_is_the_definition(starts: tuple[int, ...], first: int) -> None:
    frames, reach = 37, 4
    seen = same_chunk(starts, first, frames, reach, torch.device("cpu"))
    expected = [
        [not any(f < start - first <= f + d for start in starts) for f in range(frames)] for d in range(1, reach + 1)
    ]
    assert seen.tolist() == expected


def test_same_chunk_of_no_frames_or_no_reach_is_empty() -> None:
    assert same_chunk((1,), 0, 0, 3, torch.device("cpu")).shape == (3, 0)
    assert same_chunk((1,), 0, 5, 0, torch.device("cpu")).shape == (0, 5)
