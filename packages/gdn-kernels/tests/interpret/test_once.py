"""What is refused, and what is not, behind the gradients of operations on Triton."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_close
from camera_cases import rigid_rays
from frame_gdn_cases import KINDS, draw, run
from requirements import require_interpreter
from torch import Tensor
from torch.utils.checkpoint import checkpoint

require_interpreter()
from gdn_kernels import RayTransforms, camera_operands, camera_output  # noqa: E402
from gdn_kernels.frame_gdn import triton_op  # noqa: E402, F401  registers the operator

pytestmark = pytest.mark.interpret
SHAPE = (1, 2, 1, 8)  # B, N, H, D


def assert_refused(name: str, loss: Tensor, leaves: list[Tensor]) -> None:
    """By every way to a second backward, for all leaves and for each alone."""
    match = f"{name} is differentiable once"
    with pytest.raises(NotImplementedError, match=match):
        loss.backward(retain_graph=True)
    for leaf in leaves:
        with pytest.raises(NotImplementedError, match=match):
            torch.autograd.grad(loss, leaf, retain_graph=True)


@pytest.mark.parametrize("kind", KINDS)
def test_frame_gdn_refuses_a_second_backward(kind: str) -> None:
    """FC-A03: for every input, the initial state included."""
    without = ("q_norm_weight", "k_norm_weight", "z", "cos", "sin") if kind == "numerator" else ()
    case = draw((1, 1, 2, 2, 8), dtype=torch.float32, without=without)
    results = run(kind, case, impl="triton")
    (g,) = torch.autograd.grad(next(iter(results.values())).sum(), case["qkv"], create_graph=True)
    assert_refused("frame_gdn", g.square().sum(), [x for x in case.values() if x.requires_grad])


def test_the_operator_of_a_graph_refuses_it_too() -> None:
    case = draw((1, 1, 2, 2, 8), dtype=torch.float32)
    inputs = [case["qkv"], None, None, None, case["beta"], case["decay"], case["q_norm_weight"], case["k_norm_weight"],
              case["cos"], case["sin"], None]  # fmt: skip
    state = [case["kv"], case["z"], None, None]
    scalars = (True, True, True, "forward", [], 0.4, 1e-5, 0.1, "ieee", True)
    output = torch.ops.gdn_kernels.frame_gdn(*inputs, *state, *scalars)[0]
    (g,) = torch.autograd.grad(output.sum(), case["qkv"], create_graph=True)
    assert_refused("frame_gdn", g.square().sum(), [x for x in case.values() if x.requires_grad])


def operands() -> tuple[list[Tensor], RayTransforms]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    weights = [torch.randn(8, generator=generator) for _ in range(2)]
    return [x.requires_grad_() for x in (q, k, v, *weights)], RayTransforms(*(x.float() for x in rigid_rays(1, 2, 1.0)))


def prepare(q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, rays: RayTransforms) -> Tensor:
    found = camera_operands(
        q, k, v, rays, frames=1, rope=None, q_norm_weight=q_weight, k_norm_weight=k_weight, impl="triton"
    )
    return torch.cat([x.flatten() for x in found])


def test_camera_operands_refuses_a_second_backward() -> None:
    """v has no gradient of second order: nothing but v's own reads it, and that is a constant."""
    (q, k, v, *weights), rays = operands()
    found = prepare(q, k, v, *weights, rays)
    (g,) = torch.autograd.grad(found.sum(), k, create_graph=True)
    assert_refused("camera_operands", g.square().sum(), [q, k, *weights])


def test_camera_operands_runs_again_in_a_checkpoint() -> None:
    """A checkpoint unpacks what was saved a single time."""
    given, rays = operands()
    expected = torch.autograd.grad(prepare(*given, rays).sum(), given)
    for create_graph in (False, True):
        found = torch.autograd.grad(
            checkpoint(prepare, *given, rays, use_reentrant=False).sum(), given, create_graph=create_graph
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_camera_output_is_linear_and_its_second_backward_right() -> None:
    (x, *_), rays = operands()
    upstream = torch.randn(SHAPE)
    (g,) = torch.autograd.grad((camera_output(x, rays, impl="triton") ** 2 * upstream).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(g.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    (g,) = torch.autograd.grad((camera_output(wide, rays, impl="torch") ** 2 * upstream).sum(), wide, create_graph=True)
    (expected,) = torch.autograd.grad(g.square().sum(), wide)
    assert_close(found, expected, 1e-5)
