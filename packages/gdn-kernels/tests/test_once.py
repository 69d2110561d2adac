"""Formulas that are differentiable once: whatever a second backward is taken by and for, it raises."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdn_kernels import gated_delta_product, l2_normalize
from gdn_kernels.once import once_differentiable

# torch's advice, once a process, against what is tested
LEFT_IN_LEAVES = pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True:UserWarning")
REFUSAL = "{} is differentiable once; its gradients cannot be differentiated again"


def formula(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    return 2 * dy * x * weight, (dy * x * x).sum(0), ctx.nothing


class Quadratic(torch.autograd.Function):
    """``weight x^2``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, other: None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.nothing = other
        return weight * x**2

    @staticmethod
    @once_differentiable("quadratic")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return formula(ctx, dy)


class Threaded(torch.autograd.Function):
    """``x^2 / 2`` that saves a copy of x, which leads nowhere, and an empty output, which leads to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        thread = x.new_empty(0)
        ctx.save_for_backward(x.clone(), thread)
        return x**2 / 2, thread

    @staticmethod
    @once_differentiable("threaded")
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor]:
        return (dy * ctx.saved_tensors[0],)


@torch.library.custom_op("gdn_kernels_test::quadratic", mutates_args=())
def quadratic_op(x: Tensor, weight: Tensor, other: Tensor | None) -> Tensor:
    return weight * x**2


@quadratic_op.register_fake
def _(x: Tensor, weight: Tensor, other: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.nothing = None


quadratic_op.register_autograd(once_differentiable("quadratic")(formula), setup_context=setup_context)
CALLS = [pytest.param(Quadratic.apply, id="Function"), pytest.param(quadratic_op, id="operator")]


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((3, 2), (2,)))
    return x.requires_grad_(), weight.requires_grad_()


def second_backwards(loss: Tensor, given: list[Tensor]) -> list[Callable[[], object]]:
    """Return every way to differentiate ``loss`` again: for all leaves, and for each alone."""
    return [
        lambda: loss.backward(retain_graph=True),
        *(lambda x=x: torch.autograd.grad(loss, x, retain_graph=True) for x in given),
    ]


def assert_refused(name: str, loss: Tensor, given: list[Tensor]) -> None:
    for again in second_backwards(loss, given):
        with pytest.raises(NotImplementedError, match=REFUSAL.format(name)):
            again()


@pytest.mark.parametrize("first", [0, 1], ids=["input", "parameter"])
@pytest.mark.parametrize("call", CALLS)
def test_a_second_backward_raises(call: Callable[..., Tensor], first: int) -> None:
    """FC-A03: with an incoming gradient that requires none, for one that the node's own inputs would not lead to."""
    x, weight = leaves()
    (g,) = torch.autograd.grad(call(x, weight, None).sum(), (x, weight)[first], create_graph=True)
    assert_refused("quadratic", g.square().sum(), [x, weight])


@pytest.mark.parametrize("call", CALLS)
def test_a_second_backward_raises_for_the_incoming_gradient(call: Callable[..., Tensor]) -> None:
    x, weight = (y.detach() for y in leaves())
    x.requires_grad_()
    dy = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(call(x, weight, None), x, dy, create_graph=True)
    assert_refused("quadratic", g.square().sum(), [dy, x])


@LEFT_IN_LEAVES
def test_a_second_backward_raises_behind_gradients_left_in_leaves() -> None:
    x, weight = leaves()
    Quadratic.apply(x, weight, None).sum().backward(create_graph=True)
    assert_refused("quadratic", x.grad.square().sum(), [x, weight])
    x.grad = weight.grad = None  # a graph that leads to its own leaves


def test_an_empty_output_leads_to_inputs_that_are_not_saved() -> None:
    x, _ = leaves()
    (g,) = torch.autograd.grad(Threaded.apply(2 * x)[0].sum(), x, create_graph=True)
    assert_refused("threaded", g.square().sum(), [x])


@pytest.mark.parametrize("call", CALLS)
def test_first_order_gradients_are_the_same_with_a_graph(call: Callable[..., Tensor]) -> None:
    x, weight = leaves()
    dy = torch.randn(3, 2, dtype=torch.float64)
    plain = torch.autograd.grad(call(x, weight, None), (x, weight), dy)
    found = torch.autograd.grad(call(x, weight, None), (x, weight), dy, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert all(not a.requires_grad and b.requires_grad for a, b in zip(plain, found, strict=True))
    for g in found:
        g.detach_()  # an optimizer's zero_grad, which no view would allow


def test_gradients_of_other_paths_stay_twice_differentiable() -> None:
    """Only what meets the gradients is refused."""
    x, weight = leaves()
    (g,) = torch.autograd.grad((Quadratic.apply(x, weight, None) + x**3).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    assert torch.allclose(torch.autograd.grad(h.sum(), x)[0], 6 * x)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        g.sum().backward()


def test_constants_have_no_gradient_to_refuse() -> None:
    _, weight = leaves()
    (g,) = torch.autograd.grad(Linear.apply(weight).sum(), weight, create_graph=True)
    assert not g.requires_grad


class Linear(torch.autograd.Function):
    """``3 x``: the gradient does not depend on x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    @once_differentiable("linear")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        return (3 * dy,)


def test_without_a_graph_the_formula_is_called_as_it_is() -> None:
    """Its own context in, its own tensors out, and what was saved goes with the graph."""
    seen: list[object] = []

    class Spy(Linear):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            seen.append(weakref.ref(x))
            return 3 * x

        @staticmethod
        @once_differentiable("spy")
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
            assert isinstance(ctx, torch.autograd.function.BackwardCFunction)
            seen.append(dx := 3 * dy)
            return (dx,)

    x, _ = leaves()
    (g,) = torch.autograd.grad(Spy.apply(2 * x).sum(), x)
    assert g.grad_fn is None
    assert torch.equal(g, 2 * seen.pop())
    gc.collect()
    assert seen[0]() is None


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_saved_tensors_are_unpacked_once(call: Callable[..., Tensor], create_graph: bool) -> None:
    """Checkpoints and offloading hand them out, or fetch them, once."""
    x, weight = leaves()
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y.detach(), lambda y: unpacked.append(y) or y):
        y = call(x, weight, None)
    torch.autograd.grad(y.sum(), x, create_graph=create_graph)
    assert len(unpacked) == 2


@pytest.mark.parametrize("call", CALLS)
def test_a_checkpoint_gives_the_gradients_and_refuses_the_second(call: Callable[..., Tensor]) -> None:
    x, weight = leaves()
    expected = torch.autograd.grad(call(x, weight, None).sum(), (x, weight))
    y = checkpoint(call, x, weight, None, use_reentrant=False)
    found = torch.autograd.grad(y.sum(), (x, weight), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert_refused("quadratic", found[0].square().sum(), [x, weight])


@LEFT_IN_LEAVES
@pytest.mark.parametrize("call", CALLS)
def test_a_reentrant_checkpoint_gives_the_gradients(call: Callable[..., Tensor]) -> None:
    """It makes no graph of its backward, by torch's own choice: the gradients are constants, and say so."""
    x, weight = leaves()
    expected = torch.autograd.grad(call(x, weight, None).sum(), (x, weight))
    checkpoint(call, x, weight, None, use_reentrant=True).sum().backward(create_graph=True)
    assert all(torch.equal(a, y.grad) for a, y in zip(expected, (x, weight), strict=True))
    assert not x.grad.requires_grad


# tracing makes an instance of every autograd.Function it meets, which torch itself warns about
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("call", CALLS)
def test_it_compiles_into_one_graph(call: Callable[..., Tensor]) -> None:
    """Where torch refuses the second backward itself."""
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: call(*given, None).sum(), fullgraph=True, backend="aot_eager")
    x, weight = leaves()
    expected = torch.autograd.grad(call(x, weight, None).sum(), (x, weight))
    for create_graph in (False, True):
        found = torch.autograd.grad(compiled(x, weight), (x, weight), create_graph=create_graph)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for again in second_backwards(found[0].square().sum(), [x, weight]):
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            again()


def test_gradients_may_be_batched() -> None:
    """As `torch.autograd.functional.jacobian` takes them."""
    x, weight = leaves()
    upstream = torch.eye(6, dtype=torch.float64).view(6, 3, 2)
    y = Quadratic.apply(x, weight, None)
    (rows,) = torch.autograd.grad(y, x, upstream, is_grads_batched=True, create_graph=True)
    assert torch.allclose(rows, 2 * x * weight * upstream)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        rows.square().sum().backward()


def test_l2_normalize_refuses_it() -> None:
    x, weight = leaves()
    (g,) = torch.autograd.grad((l2_normalize(x) * weight.detach()).sum(), x, create_graph=True)
    assert_refused("l2_normalize", g.square().sum(), [x])


@pytest.mark.parametrize("first", range(6))
def test_gated_delta_product_refuses_it(first: int) -> None:
    """Whichever gradient comes first, for every input."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 3, 1, 2), (1, 6, 1, 2), (1, 6, 1, 2), (1, 6, 1), (1, 3, 1), (1, 1, 2, 2))
    given = [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    given[4] = -given[4]
    q, k, v, beta, g, state = (x.requires_grad_() for x in given)
    output = gated_delta_product(q, k, v, beta, g, num_householder=2, initial_state=state).output
    (dx,) = torch.autograd.grad(output.sum(), given[first], create_graph=True)
    assert_refused("gated_delta_product", dx.square().sum(), given)
