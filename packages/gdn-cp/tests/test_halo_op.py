"""The operator of halo exchanges in a compiled graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from gdn_cp import CPContext, FramePartition
from gdn_cp.halo_op import call_op

pytestmark = pytest.mark.ranks


def test_operator_keeps_the_rules_of_operators() -> None:
    """FC-I08: schema, fake implementation and autograd, on a group of one rank, strided input."""

    def worker(rank: int) -> dict[str, str]:
        context, x = CPContext(dist.group.WORLD), torch.rand(2, 4, 3, dtype=torch.float64).movedim(1, 0)
        x = x.requires_grad_()
        assert call_op(x, context, FramePartition((4,)), 2, 1, 0.5)[:, 0, 0].tolist()[::6] == [0.5, 0.5]
        arguments = (x, None, context.handle, [4], 2, 1, 0.5, True, True)
        return torch.library.opcheck(torch.ops.gdn_cp.halo.default, arguments)

    (found,) = run_ranks(1, worker)
    assert set(found.values()) == {"SUCCESS"}
