"""The camera kernels on a GPU: errors against fp64, widths, strides, sizes, bits, graphs, compilations."""

from __future__ import annotations

import pytest
import torch
from requirements import require_gpu

require_gpu()
import triton  # noqa: E402
from agreement import assert_same  # noqa: E402
from camera import BOUNDS, Inputs, draw, errors  # noqa: E402
from clips import relative_error  # noqa: E402
from run import captured  # noqa: E402
from shapes import Shape  # noqa: E402
from torch import Tensor  # noqa: E402
from triton_against_torch import LAYOUTS, Strided, one_number_expanded  # noqa: E402

from gdn_kernels import RayTransforms  # noqa: E402

pytestmark = pytest.mark.gpu
SMALL = Shape(2, 3, 50, 5, 112, "")
WIDTHS = (8, 16, 40, 64, 72, 112, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def everything(inputs: Inputs, impl: str = "triton") -> dict[str, Tensor]:
    """Return all results and gradients by name."""
    results = (*inputs.operands(impl), inputs.output(impl))
    gradients = (*inputs.operand_gradients(impl), *inputs.output_gradient(impl))
    names = ("q", "k", "v", "inflation", "output", "dq", "dk", "dv", "dwq", "dwk", "dx")
    return {name: x.detach() for name, x in zip(names, (*results, *gradients), strict=True)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_errors_are_those_of_one_rounding(width: int, dtype: torch.dtype) -> None:
    """Memory that nobody wrote holds NaN here, so this sees every entry that a kernel leaves out."""
    for heads, spatial in ((5, 50), (1, 1), (20, 7)):
        inputs = draw(Shape(2, 3, spatial, heads, width, ""), dtype, "cuda")
        worst = max(errors(inputs, "triton"))
        print(width, dtype, heads, spatial, worst)
        assert worst <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_repeat_bit_by_bit(dtype: torch.dtype) -> None:
    inputs = draw(Shape(1, 11, 920, 20, 112, ""), dtype, "cuda")
    expected = everything(inputs)
    for _ in range(3):
        for name, value in everything(inputs).items():
            assert_same(value, expected[name], name)


@pytest.mark.parametrize("layout", [*LAYOUTS, one_number_expanded])
def test_operands_and_incoming_gradients_may_have_any_strides(layout: Strided) -> None:
    inputs = draw(SMALL, torch.bfloat16, "cuda")
    strided = [layout(x.detach()).requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.x)]
    douts = [layout(x) for x in inputs.douts]
    found = everything(
        inputs._replace(q=strided[0], k=strided[1], v=strided[2], x=strided[3], douts=tuple(douts))
    )  # fmt: skip
    plain = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in strided]
    expected = everything(
        inputs._replace(
            q=plain[0], k=plain[1], v=plain[2], x=plain[3], douts=tuple(x.contiguous() for x in douts)
        )
    )  # fmt: skip
    for name, value in expected.items():
        assert relative_error(found[name], value.double()) <= 2.0**-9, name


def test_slices_of_one_tensor_are_taken_as_they_are() -> None:
    inputs = draw(SMALL, torch.bfloat16, "cuda")
    fused = torch.stack([x.detach() for x in inputs[:3]], 2)
    q, k, v = (x.requires_grad_() for x in fused.detach().unbind(2))
    found, expected = everything(inputs._replace(q=q, k=k, v=v)), everything(inputs)
    for name, value in expected.items():
        assert_same(found[name], value, name)


def test_cameras_very_far_away_stay_as_near_to_fp64_as_torch() -> None:
    inputs = draw(SMALL, torch.float32, "cuda")
    rays = [x.clone() for x in inputs.rays]
    for x in rays:
        x[..., :3, 3] *= 1e6
    inputs = inputs._replace(rays=RayTransforms(*rays))
    exact = everything(inputs.double(), "torch")
    low, found = everything(inputs, "torch"), everything(inputs)
    for name, value in exact.items():
        assert relative_error(found[name], value) <= 8 * max(relative_error(low[name], value), 2.0**-21), name


@pytest.mark.whole_gpu
def test_last_batch_row_beyond_two_to_the_31_elements_equals_the_row_alone() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 100e9:
        pytest.skip("needs 100 GB of memory")
    torch.utils.deterministic.fill_uninitialized_memory = False  # NaN over all of it is only time
    alone = draw(Shape(1, 10, 880, 20, 112, ""), torch.bfloat16, "cuda")

    def many(x: Tensor) -> Tensor:
        wide = x.detach().expand(110, *x.shape[1:]).contiguous()
        wide[:-1] *= 0.5  # a row read from another's place is another row
        return wide

    rays = RayTransforms(*(x.expand(110, *x.shape[1:]) for x in alone.rays))
    q, dout = many(alone.q), many(alone.douts[0])
    assert q.numel() > 2**31
    wide = alone._replace(q=q.requires_grad_(), rays=rays)
    wide = wide._replace(k=wide.q, v=wide.q)
    single = alone._replace(k=alone.q, v=alone.q)
    got, expected = wide.operands("triton"), single.operands("triton")
    for name, x, y in zip(("q", "k", "v", "inflation"), got, expected, strict=True):
        assert_same(x[-1:].detach(), y.detach(), name)
    dq = torch.autograd.grad(got[:3], wide.q, (dout, dout, dout))[0]
    expected_dq = torch.autograd.grad(expected[:3], single.q, (alone.douts[0],) * 3)[0]
    assert relative_error(dq[-1:], expected_dq.double()) <= 2.0**-9
    del got, dq, dout
    x = wide.q.detach().requires_grad_()
    y = wide._replace(x=x).output("triton")
    assert_same(y[-1:].detach(), single._replace(x=single.q).output("triton").detach(), "output")


def test_sizes_compile_nothing_new() -> None:
    compiled: list[str] = []
    everything(draw(Shape(2, 4, 64, 4, 112, ""), torch.bfloat16, "cuda"))
    kept = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **named: compiled.append(named["repr"])
    try:
        for frames, spatial, heads, batch in (
            (3, 64, 4, 2), (1, 64, 4, 2), (4, 1, 4, 2), (16, 16, 16, 1), (3, 65, 4, 1), (3, 64, 1, 2), (1, 1, 1, 1),
            (11, 920, 20, 1),
        ):  # fmt: skip
            everything(draw(Shape(batch, frames, spatial, heads, 112, ""), torch.bfloat16, "cuda"))
        within = list(compiled)
        everything(draw(Shape(1, 2, 16, 2, 24, ""), torch.bfloat16, "cuda"))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = kept
    assert not within
    assert compiled  # the hook does see compilations: another width needs them


def test_captured_forward_and_backward_replay_on_new_values() -> None:
    inputs = draw(SMALL, torch.bfloat16, "cuda", seed=0)
    kept: dict[str, Tensor] = {}
    graph = captured(lambda: kept.update(everything(inputs)))
    fresh = draw(SMALL, torch.bfloat16, "cuda", seed=5)
    with torch.no_grad():
        for old, new in zip((*inputs[:6], *inputs.rays, *inputs.douts), (*fresh[:6], *fresh.rays, *fresh.douts)):
            old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for name, value in everything(fresh).items():
        assert_same(kept[name], value, name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler imports
def test_compiled_call_equals_the_eager_one() -> None:
    torch._dynamo.reset()
    inputs = draw(SMALL, torch.bfloat16, "cuda")
    eager = everything(inputs)
    results = torch.compile(lambda given: given.operands("triton"), fullgraph=True)(inputs)
    gradients = torch.autograd.grad(results, inputs[:5], inputs.douts[:4])
    names = ("q", "k", "v", "inflation", "dq", "dk", "dv", "dwq", "dwk")
    for name, value in zip(names, (*results, *gradients), strict=True):
        assert_same(value.detach(), eager[name], name)
