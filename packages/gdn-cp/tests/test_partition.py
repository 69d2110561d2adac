"""Who owns which frames."""

import itertools
import subprocess
import sys

import pytest
import torch

from gdn_cp import FramePartition


def test_members():
    partition = FramePartition((3, 0, 2))
    assert (partition.size, partition.total, partition.starts) == (3, 5, (0, 3, 3, 5))
    assert [partition.span(rank) for rank in range(3)] == [range(3), range(3, 3), range(3, 5)]
    assert [partition.owner(frame) for frame in range(5)] == [0, 0, 0, 2, 2]
    assert hash(partition) == hash(FramePartition((3, 0, 2)))


def test_even_gives_the_first_ranks_more():
    assert FramePartition.even(121, 2).counts == (61, 60)
    assert FramePartition.even(11, 4).counts == (3, 3, 3, 2)
    assert FramePartition.even(3, 5).counts == (1, 1, 1, 0, 0)


def test_aligned_and_at_chunks_cut_only_where_allowed():
    for frames, size, multiple in itertools.product((1, 7, 21), (1, 2, 3, 5), (1, 2, 4)):
        partition = FramePartition.aligned(frames, size, multiple)
        assert partition.total == frames
        assert all(start % multiple == 0 or start == frames for start in partition.starts)
    starts = (0, 1, 4, 7, 10)
    assert set(FramePartition.at_chunks(12, 3, starts).starts) <= {*starts, 12}
    assert FramePartition.at_chunks(12, 2, starts).counts == (7, 5)


def test_split_is_a_view_of_the_ranks_frames():
    x, partition = torch.arange(10).reshape(2, 5), FramePartition((3, 2))
    assert torch.equal(partition.split(x, 1, 1), x[:, 3:])
    assert partition.split(x, 1, 1).data_ptr() == x[:, 3:].data_ptr()
    with pytest.raises(ValueError, match="must have F = 5 frames along dim 0, got 2"):
        partition.split(x, 0, 0)


def test_local_starts_keep_a_start_on_a_ranks_first_frame():
    partition = FramePartition((3, 0, 4))
    assert [partition.local_starts((0, 2, 3, 6), rank) for rank in range(3)] == [(2,), (), (0, 3)]


def test_halo_names_every_owner_in_time_order():
    partition = FramePartition((2, 1, 0, 3))
    assert partition.halo(3, 2, 1) == [(0, range(1, 2)), (1, range(2, 3))]
    assert partition.halo(0, 4, 2) == [(1, range(2, 3)), (3, range(3, 4))]
    assert partition.halo(2, 2, 2) == []
    with pytest.raises(ValueError, match="left and right must be >= 0, got -1 and 0"):
        partition.halo(0, -1, 0)


@pytest.mark.parametrize("counts", [(), (0, 0), (2, -1)])
def test_counts_without_frames_or_below_zero_are_refused(counts):
    with pytest.raises(ValueError, match="counts must be >= 0 with at least one frame in all"):
        FramePartition(counts)


@pytest.mark.parametrize("counts", [(1.5, 2), "12", (True, 2), torch.tensor([1, 2])])
def test_counts_of_another_type_are_refused(counts):
    with pytest.raises(TypeError, match="counts must be a tuple of ints"):
        FramePartition(counts)


def test_values_out_of_range_are_named():
    partition = FramePartition((3, 2))
    with pytest.raises(ValueError, match=r"frame must lie in 0 \.\.\. 4, got 5"):
        partition.owner(5)
    with pytest.raises(ValueError, match=r"rank must lie in 0 \.\.\. 1, got 2"):
        partition.span(2)
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        FramePartition.even(3, 0)
    with pytest.raises(ValueError, match="multiple must be >= 1, got 0"):
        FramePartition.aligned(3, 1, 0)
    with pytest.raises(ValueError, match=r"starts must lie in 0 \.\.\. F = 3"):
        FramePartition.at_chunks(3, 1, (4,))


def test_the_package_imports_without_cuda_or_triton():
    """FC-I07."""
    code = "import sys; sys.modules['triton'] = None\nimport gdn_cp, torch\nassert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
