"""A link is measured once and is the same on every rank."""

import pytest
import torch.distributed as dist
from ranks import run_ranks

from gdn_cp import CPContext, count_exchanges
from gdn_cp.cost_model import Link, measure_link, measure_maps


@pytest.mark.ranks
def test_ranks_share_what_rank_0_measured():
    def worker(rank: int):
        context = CPContext(dist.group.WORLD)
        with count_exchanges() as seen:
            link = measure_link(context, width=8, heads=2, repeats=3)
        assert CPContext(dist.group.WORLD, link=link).link is link
        return link, seen.labels

    links, labels = zip(*run_ranks(3, worker), strict=True)
    assert len(set(links)) == 1
    assert links[0].name == "measured over 3 ranks"
    assert 0 < links[0].latency < 1e6
    assert 1e-4 < links[0].bandwidth < 1e4
    assert set(sum(labels, [])) == {"measure_link"}
    assumed = Link("assumed", 1.0, 1.0)
    for field in ("fold", "compose", "advance"):
        assert 0 < getattr(links[0], field) < 1e6
        assert getattr(links[0], field) != getattr(assumed, field)


def test_larger_maps_take_longer():
    """In torch: hundreds of times the products."""
    small, large = (measure_maps(3, width=width, heads=2, repeats=7) for width in (4, 320))
    for field in small._fields:
        assert 0 < getattr(small, field) < getattr(large, field)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("directions", [1, 2])
def test_maps_of_one_stream_or_direction_are_measured_too(streams, directions):
    assert min(measure_maps(2, width=4, heads=1, streams=streams, directions=directions, repeats=1)) > 0


def test_one_rank_has_no_link():
    with pytest.raises(ValueError, match="measure_link needs a context of at least two ranks, got one"):
        measure_link(CPContext.single())
