"""The claims of `rank_claims` over NCCL, a CUDA device per rank: two ranks, and as many more as there are devices.

They start processes that take whole devices, so that nothing should run beside them: `pytest -m nccl` in a process of
its own, or ``nox -s integration -- -m nccl``; ``-k 8-ranks`` chooses a number of ranks.
"""

from collections.abc import Iterator

import pytest
import rank_claims
import torch
from rank_claims import *  # noqa: F403  the tests
from ranks import RankPool

DEVICES = torch.cuda.device_count()
SIZES = [size for size in (2, 3, 4, 8) if size <= DEVICES] or [2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nccl,
    pytest.mark.skipif(DEVICES < 2, reason=f"NCCL needs two CUDA devices, a rank each, and here are {DEVICES}"),
]


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, "cuda", timeout=300.0) as pool:
        yield pool


def test_every_claim_is_collected_here():
    assert all(name in globals() for name in rank_claims.CLAIMS)
