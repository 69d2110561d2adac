"""Who owns which tokens, and which fragments of packed sequences: against a count token by token."""

import itertools

import pytest
import torch

from gdn_cp import TokenPartition, token_partition
from gdn_cp.token_partition import PackedSequenceCPMetadata, build_packed_sequence_cp_metadata


def cumulative(lengths):
    return (0, *itertools.accumulate(lengths))


def compositions(total, parts):
    """All ways to write ``total`` as ``parts`` numbers >= 0."""
    for cuts in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *cuts, total + parts - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


def counted(lengths, counts, rank):
    """Start, stop, local sequence of every token and local bounds, by walking over the tokens one by one."""
    ids = [i for i, length in enumerate(lengths) for _ in range(length)]
    ranks = [r for r, count in enumerate(counts) for _ in range(count)]
    local = [i for i, r in zip(ids, ranks, strict=True) if r == rank]
    if not local:
        return rank, rank + 1, local, [0]
    holders = [[r for i, r in zip(ids, ranks, strict=True) if i == held] for held in (local[0], local[-1])]
    bounds = [0, *(i for i in range(1, len(local)) if local[i] != local[i - 1]), len(local)]
    return min(holders[0]), max(holders[1]) + 1, local, bounds


def test_it_has_the_surface_of_a_partition():
    partition = TokenPartition((3, 0, 2))
    assert (partition.size, partition.total, partition.starts) == (3, 5, (0, 3, 3, 5))
    assert TokenPartition.even(7, 2) == TokenPartition((4, 3))
    assert TokenPartition.aligned(200, 2, 64).counts == (128, 72)
    assert partition.halo(2, 4, 0) == [(0, range(3))]
    x = torch.arange(5)
    assert partition.split(x, 2, 0).tolist() == [3, 4]
    with pytest.raises(ValueError, match="at least one token in all"):
        TokenPartition((0,))
    with pytest.raises(ValueError, match="must have T = 5 tokens along dim 0, got 4"):
        partition.split(x[:4], 0, 0)
    with pytest.raises(ValueError, match=r"token must lie in 0 \.\.\. 4, got 5"):
        partition.owner(5)


def test_packed_worked_example():
    partition = TokenPartition.even(16, 4)
    found = [partition.packed((0, 5, 9, 16), rank, "cpu") for rank in range(4)]
    assert [(m.preceding_rank_start, m.following_rank_stop) for m in found] == [(0, 2), (0, 3), (1, 4), (2, 4)]
    assert [m.local_cu_seqlens.tolist() for m in found] == [[0, 4], [0, 1, 4], [0, 1, 4], [0, 4]]
    assert [m.fragment_sequences for m in found] == [(0,), (0, 1), (1, 2), (2,)]
    assert found[1].local_seq_idx.tolist() == [[0, 1, 1, 1]]
    assert all(m.any_crossing for m in found)
    assert len({m.plan for m in found}) == 1
    assert [(m.rank, m.size) for m in found] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_packed_agrees_with_a_count_token_by_token():
    """Uneven and empty shards, empty sequences, single tokens, a sequence over all ranks, cuts on boundaries."""
    for lengths, counts in itertools.product(compositions(5, 3), compositions(5, 4)):
        partition = TokenPartition(counts)
        crossing = False
        for rank in range(4):
            metadata = partition.packed(cumulative(lengths), rank, "cpu")
            start, stop, local, bounds = counted(lengths, counts, rank)
            assert (metadata.preceding_rank_start, metadata.following_rank_stop) == (start, stop)
            assert metadata.local_seq_idx.tolist() == [local]
            assert metadata.local_cu_seqlens.tolist() == bounds == list(metadata.bounds)
            assert list(metadata.fragment_sequences) == [local[i] for i in bounds[:-1] if i < len(local)]
            assert metadata.local_seq_idx.dtype == metadata.local_cu_seqlens.dtype == torch.int32
            crossing |= start < rank or stop > rank + 1
        assert {partition.packed(cumulative(lengths), r, "cpu").any_crossing for r in range(4)} == {crossing}


@pytest.mark.parametrize("cu", [(), (0,), (1, 5), (0, 3, 2, 5), (0, 4)])
def test_packed_refuses_other_bounds(cu):
    with pytest.raises(ValueError, match="cu_seqlens must start at 0, not decrease and end at T = 5"):
        TokenPartition((2, 3)).packed(cu, 0, "cpu")


@pytest.mark.parametrize("cu", [torch.tensor([0, 5]), (0, 5.0), (False, 5)])
def test_packed_refuses_what_is_not_host_integers(cu):
    with pytest.raises(TypeError, match="cu_seqlens must be a tuple of ints"):
        TokenPartition((2, 3)).packed(cu, 0, "cpu")
    with pytest.raises(ValueError, match=r"rank must lie in 0 \.\.\. 1, got 2"):
        TokenPartition((2, 3)).packed((0, 5), 2, "cpu")


def test_build_metadata_agrees_with_packed():
    for lengths, size in itertools.product(compositions(6, 3), (1, 2, 3, 6)):
        ids = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]], dtype=torch.int32)
        for rank in range(size):
            expected = TokenPartition.even(6, size).packed(cumulative(lengths), rank, "cpu")
            found = build_packed_sequence_cp_metadata(ids, cp_rank=rank, cp_size=size)
            for name in (
                "preceding_rank_start",
                "following_rank_stop",
                "fragment_sequences",
                "any_crossing",
                "plan",
                "rank",
                "size",
            ):
                assert getattr(found, name) == getattr(expected, name), name
            assert torch.equal(found.local_seq_idx, expected.local_seq_idx)
            assert torch.equal(found.local_cu_seqlens, expected.local_cu_seqlens)


def test_build_metadata_errors():
    def ids(*values, dtype=torch.int32):
        return torch.tensor([values], dtype=dtype)

    with pytest.raises(ValueError, match=r"global_seq_idx must have shape \[1, T\], got \[4\]"):
        build_packed_sequence_cp_metadata(ids(0, 0, 1, 1)[0], 0, 2)
    with pytest.raises(ValueError, match=r"shape \[1, T\], got \[2, 2\]"):
        build_packed_sequence_cp_metadata(ids(0, 0, 1, 1).view(2, 2), 0, 2)
    with pytest.raises(ValueError, match="must have dtype int32, got int64"):
        build_packed_sequence_cp_metadata(ids(0, 1, dtype=torch.int64), 0, 2)
    with pytest.raises(ValueError, match="a multiple of cp_size = 3 tokens, got T = 4"):
        build_packed_sequence_cp_metadata(ids(0, 0, 1, 1), 0, 3)
    with pytest.raises(ValueError, match="at least one token"):
        build_packed_sequence_cp_metadata(torch.empty(1, 0, dtype=torch.int32), 0, 2)
    with pytest.raises(ValueError, match=r"must not decrease, got sequences \[0, 1, 0\]"):
        build_packed_sequence_cp_metadata(ids(0, 1, 1, 0), 0, 2)
    with pytest.raises(ValueError, match=r"rank must lie in 0 \.\.\. 1, got 2"):
        build_packed_sequence_cp_metadata(ids(0, 1), 2, 2)


def test_sequences_are_walked_over_a_fixed_number_of_times():
    """However many ranks there are."""

    class Counted(list):
        walks = 0

        def __iter__(self):
            self.walks += 1
            return super().__iter__()

    def walks(size):
        starts = Counted(range(0, 64, 2))
        found = token_partition._metadata(
            TokenPartition.even(64, size), starts, list(range(32)), 1, None, torch.device("cpu")
        )
        assert not found.any_crossing
        return starts.walks

    assert walks(2) == walks(32)


def test_metadata_of_the_published_fields_alone_reads_its_bounds():
    metadata = PackedSequenceCPMetadata(torch.zeros(1, 3), torch.tensor([0, 1, 3], dtype=torch.int32), 0, 2)
    assert metadata.bounds == (0, 1, 3)
    assert metadata.any_crossing


def test_packed_runs_outside_a_compiled_graph(monkeypatch):
    compiling, make, partition = [], token_partition._metadata, TokenPartition((3, 0, 4))

    def watched(*arguments):
        compiling.append(torch.compiler.is_compiling())
        return make(*arguments)

    def around(x, cu_seqlens):
        x = x + 1.0
        metadata = partition.packed(cu_seqlens, 2, "cpu")
        return x * metadata.following_rank_stop, metadata

    monkeypatch.setattr(token_partition, "_metadata", watched)
    for cu_seqlens in ((0, 2, 7), (0, 4, 7)):
        found, expected = (f(torch.arange(3.0), cu_seqlens) for f in (torch.compile(around, backend="eager"), around))
        assert torch.equal(found[0], expected[0])
        assert found[1].bounds == expected[1].bounds
    assert compiling == [False] * 4
