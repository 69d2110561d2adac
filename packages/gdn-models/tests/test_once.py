"""A second backward through every block: where second-order terms would be missing it raises, elsewhere it is right."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from camera_loops import poses
from comparison import assert_close, randomize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gdn_models
from gdn_cp import CPContext
from gdn_models import reduce_loss

B, F, S, H, D = 1, 3, 2, 2, 8
C, GRID = H * D, (F, S, 1)
REFUSAL = r"^[\w.]+ is differentiable once; its gradients cannot be differentiated again$"
BARE = {"conv_size": 0, "output_gate": False}
BLOCKS = {
    name: kind for name, kind in vars(gdn_models).items() if isinstance(kind, type) and issubclass(kind, nn.Module)
}


def make(name: str, **options: object) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a block with random weights, and its leaves, x first; a larger eps keeps the division tame."""
    own = {"head_dim": D} if name == "GatedDeltaProduct" else {"eps": 0.5}
    block = BLOCKS[name](dim=C, heads=H, **own, **options).double()
    randomize(block)
    x = torch.randn(B, F * S, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return block, {"x": x.requires_grad_(), **dict(block.named_parameters())}


def call(block: nn.Module, x: Tensor) -> Tensor:
    arguments: list[object] = [] if "DeltaProduct" in type(block).__name__ else [GRID]
    if "Camera" in type(block).__name__:
        arguments.append(poses(B, F))
    y: Tensor = block(x, *arguments, **({"chunk_starts": (2,)} if "Chunk" in type(block).__name__ else {}))
    return y


def penalty(run: Callable[[], Tensor], leaves: list[Tensor], create_graph: bool = True) -> Tensor:
    """Return the squared norm of the gradient of a loss whose own gradient is a constant."""
    found = torch.autograd.grad(run().sum(), leaves, create_graph=create_graph)
    return sum((g.square().sum() for g in found), torch.zeros((), dtype=torch.float64))


def slope(run: Callable[[], Tensor], leaves: list[Tensor], at: Tensor, direction: Tensor) -> float:
    """Return the derivative of the penalty along a direction, from differences of first-order gradients."""
    values = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            at.add_(direction, alpha=step)
        values.append(float(penalty(run, leaves, create_graph=False)))
    with torch.no_grad():
        at.add_(direction, alpha=1e-5)
    return (values[0] - values[1]) / 2e-5


def refused(run: Callable[[], Tensor], given: list[Tensor], leaves: dict[str, Tensor]) -> set[str]:
    """Differentiate the penalty for every leaf alone; return those for which it raises. It is right for the others."""
    value, found = penalty(run, given), set()
    with pytest.raises(NotImplementedError, match=REFUSAL):
        value.backward(retain_graph=True)
    for name, leaf in leaves.items():
        try:
            (second,) = torch.autograd.grad(value, leaf, retain_graph=True, materialize_grads=True)
        except NotImplementedError as error:
            if not re.match(REFUSAL, str(error)):
                raise
            found.add(name)
        else:
            direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
            assert float((second * direction).sum()) == pytest.approx(
                slope(run, given, leaf, direction), rel=1e-5, abs=1e-8 * float(value.detach())
            ), name
    return found


@pytest.mark.parametrize("options", [{}, BARE], ids=["default", "bare"])
@pytest.mark.parametrize("of", ["x", "parameters"])
@pytest.mark.parametrize("name", BLOCKS)
def test_no_term_of_second_order_is_missing(name: str, of: str, options: dict[str, object]) -> None:
    """FC-A03: what is not refused is what differences give, which is nothing for a bias of the last layers."""
    block, leaves = make(name, **options)
    given = [leaves["x"]] if of == "x" else list(block.parameters())
    assert leaves.keys() - refused(lambda: call(block, leaves["x"]), given, leaves) <= {
        "proj.bias",
        "out_proj_cam.bias",
    }


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("name", BLOCKS)
def test_first_order_gradients_are_those_without_a_graph(name: str, checkpointed: bool) -> None:
    """To rounding: with a graph torch takes other formulas for some of its own operations."""
    block, leaves = make(name)
    given = list(leaves.values())
    expected = torch.autograd.grad(call(block, leaves["x"]).sum(), given)
    y = checkpoint(call, block, leaves["x"], use_reentrant=False) if checkpointed else call(block, leaves["x"])
    found = torch.autograd.grad(y.sum(), given, create_graph=True)
    for ours, theirs, leaf_name in zip(found, expected, leaves, strict=True):
        assert_close(ours, theirs, 1e-12, leaf_name)
    value = sum((g.square().sum() for g in found), torch.zeros((), dtype=torch.float64))
    for leaf in (leaves["x"], block.A_log):
        with pytest.raises(NotImplementedError, match=REFUSAL):
            torch.autograd.grad(value, leaf, retain_graph=True)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        value.backward()


# tracing makes an instance of every autograd.Function it meets, which torch itself warns about
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["FrameGDN", "GatedDeltaProduct"])
def test_a_compiled_block_gives_the_gradients_and_torch_refuses_the_second(name: str) -> None:
    torch.compiler.reset()
    block, leaves = make(name)
    given = list(leaves.values())
    compiled = torch.compile(lambda x: call(block, x), fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(call(block, leaves["x"]).sum(), given)
    found = torch.autograd.grad(compiled(leaves["x"]).sum(), given, create_graph=True)
    for ours, theirs, leaf_name in zip(found, expected, leaves, strict=True):
        assert_close(ours, theirs, 1e-12, leaf_name)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        found[0].square().sum().backward()


def test_a_weighted_loss_stays_linear() -> None:
    """`reduce_loss` adds no refusal to what a loss itself allows."""
    x = torch.tensor(3.0, requires_grad=True)
    (g,) = torch.autograd.grad(reduce_loss(x**3, CPContext.single(), 1), x, create_graph=True)
    assert float(torch.autograd.grad(g, x)[0]) == 18.0
