"""A link is measured once and is the same on every rank."""

import pytest
import torch.distributed as dist
from ranks import run_ranks

from gdn_cp import CPContext, count_exchanges
from gdn_cp.cost_model import measure_link


@pytest.mark.ranks
def test_ranks_share_what_rank_0_measured():
    def worker(rank: int):
        context = CPContext(dist.group.WORLD)
        with count_exchanges() as seen:
            link = measure_link(context, repeats=3)
        assert CPContext(dist.group.WORLD, link=link).link is link
        return link, seen.labels

    links, labels = zip(*run_ranks(3, worker), strict=True)
    assert len(set(links)) == 1
    assert links[0].name == "measured over 3 ranks"
    assert 0 < links[0].latency < 1e6
    assert 1e-4 < links[0].bandwidth < 1e4
    assert set(sum(labels, [])) == {"measure_link"}


def test_one_rank_has_no_link():
    with pytest.raises(ValueError, match="measure_link needs a context of at least two ranks, got one"):
        measure_link(CPContext.single())
