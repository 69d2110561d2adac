"""The blocks under torch.compile: one graph, the same numbers as eager, gradients included."""

from __future__ import annotations

import pytest
import torch
from model_cases import CLASSES, Case, camera_of, clip_of, error, make
from torch import nn

from gdn_models import CameraChunkCausalGDN, FrameGDN

# tracing makes an instance of every autograd.Function it meets, which torch itself warns about
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)


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


def graphs_of(block: nn.Module) -> tuple[nn.Module, list[object]]:
    """Return the compiled block and the list that every graph made for it goes into."""
    torch.compiler.reset()
    made: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        made.append(graph)
        return graph.forward

    return torch.compile(block, fullgraph=True, backend=backend), made


def test_the_torch_implementation_is_compiled_once_per_number_of_frames() -> None:
    """What the guide on streaming says: the loop over frames is in the graph; other sizes become variables."""
    call, made = graphs_of(FrameGDN(dim=12, heads=2))
    counts = []
    for batch, frames in ((1, 3), (1, 2), (1, 3), (2, 2), (3, 2)):
        call(torch.rand(batch, frames * 4, 12), (frames, 2, 2))
        counts.append(len(made))
    assert counts == [1, 2, 2, 3, 3]


def test_a_stream_compiles_and_gives_what_eager_does() -> None:
    block = FrameGDN(dim=12, heads=2)
    call, made = graphs_of(block)
    state = expected_state = block.init_state(1, (0, 2, 2))
    for _ in range(4):
        x = torch.rand(1, 12, 12)
        with torch.no_grad():
            y, state = call(x, (3, 2, 2), state=state)
            expected, expected_state = block(x, (3, 2, 2), state=expected_state)
        assert error(y, expected) < 1e-6
    assert (state.frames, state.spatial) == (12, (2, 2))
    assert len(made) == 2
