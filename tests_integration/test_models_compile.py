"""The blocks under torch.compile: one graph, the same numbers as eager, gradients included."""

from __future__ import annotations

import pytest
import torch
from model_cases import CLASSES, Case, camera_of, clip_of, error, make
from torch import nn

from gdn_models import CameraChunkCausalGDN


# tracing makes an instance of every autograd.Function it meets, which torch itself warns about
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("cls", [*CLASSES, CameraChunkCausalGDN])
def test_a_block_compiles_into_one_graph(cls: type[nn.Module]) -> None:
    """FC-I08: no graph break; outputs and gradients are those of eager to rounding."""
    sees = cls is CameraChunkCausalGDN
    case = Case(cls, (4,), options={"dim": 24 if sees else 12, "conv_qv": True})
    keywords = {"chunk_starts": (1, 3)} if cls.has_chunks else {}
    if sees:
        keywords["camera"] = camera_of(case)
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]]).bool()
    results = []
    for compiled in (False, True):
        torch.compiler.reset()
        block = make(case)
        call = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
        x, upstream = (y.reshape(2, -1, block.config.dim) for y in clip_of(case))
        x = x.detach().requires_grad_()
        y = call(x, (4, *case.spatial), frame_valid=mask, **keywords)
        y.backward(upstream)
        results.append([y, x.grad, *(p.grad for p in block.parameters())])
    for eager, found in zip(*results, strict=True):
        assert error(found.detach(), eager.detach()) < 1e-12
