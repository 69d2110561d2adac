"""The claims of `rank_claims` on the CPU, over gloo: what NCCL runs on GPUs is proven here first."""

from collections.abc import Iterator

import pytest
import rank_claims
import torch
from rank_claims import *  # noqa: F403  the tests
from ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def _compiler() -> None:
    """Load what compiling needs once, before ranks are forked: it takes each of them seconds."""
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(1, requires_grad=True)).backward()


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size}-ranks")
def ranks(request: pytest.FixtureRequest, _compiler: None) -> Iterator[RankPool]:
    with RankPool(request.param) as pool:
        yield pool


def test_every_claim_is_collected_here():
    assert len(rank_claims.CLAIMS) > 10
    assert all(name in globals() for name in rank_claims.CLAIMS)
