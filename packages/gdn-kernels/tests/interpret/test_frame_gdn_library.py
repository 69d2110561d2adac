"""The registered operators and ``torch.compile``, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import assert_close
from frame_gdn_cases import draw, leaves, run, upstream
from requirements import require_interpreter
from torch import Tensor

require_interpreter()
from gdn_kernels import frame_gdn  # noqa: E402
from gdn_kernels.frame_gdn import triton_op  # noqa: E402
from gdn_kernels.types import FrameInputs  # noqa: E402

pytestmark = pytest.mark.interpret

SIZES = (1, 2, 2, 3, 8)
NOTHING = (None, None, None, None)
_FORWARD_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
_BACKWARD_CHECKS = ("test_schema", "test_faketensor")


def operator_arguments(kind: str, direction: str, mask: bool = False) -> tuple[Any, ...]:
    """Return what `apply_triton` hands to the operator."""
    case = draw(SIZES, dtype=torch.float32)
    features = kind != "numerator"
    if features:
        weights = [case[name].detach().view(2, 8).requires_grad_() for name in ("q_norm_weight", "k_norm_weight")]
        tensors = FrameInputs(case["qkv"], None, None, None, case["beta"], case["decay"], *weights, case["cos"],
                              case["sin"], torch.tensor([[True, False]]) if mask else None)  # fmt: skip
    else:
        operands = (x.detach().clone().requires_grad_() for x in case["qkv"].unbind(2))
        tensors = FrameInputs(None, *operands, case["beta"], case["decay"], None, None, None, None, None)
    entry = (case["kv"], case["z"] if features else None, None, None) if direction != "reverse" else NOTHING
    scalars = (features, features, kind == "output", direction, [], 0.4 if features else 1.0, 1e-5, 0.1, "ieee", True)
    return (*tensors, *entry, *scalars)


@pytest.mark.parametrize(
    ("kind", "direction"), [("output", "bidirectional"), ("raw", "forward"), ("numerator", "reverse")]
)
def test_forward_operator_passes_opcheck(kind: str, direction: str) -> None:
    arguments = operator_arguments(kind, direction, mask=kind == "output")
    torch.library.opcheck(torch.ops.gdn_kernels.frame_gdn.default, arguments, test_utils=_FORWARD_CHECKS)


@pytest.mark.parametrize(
    ("kind", "direction"), [("output", "bidirectional"), ("raw", "forward"), ("numerator", "reverse")]
)
def test_backward_operator_passes_opcheck(kind: str, direction: str) -> None:
    arguments = operator_arguments(kind, direction, mask=kind == "output")
    inputs, scalars = arguments[:11], arguments[15:]
    with torch.no_grad():
        outputs = torch.ops.gdn_kernels.frame_gdn(*arguments)
    gradients = [torch.randn_like(x) if x.ndim > 1 else None for x in outputs[:6]]
    if kind == "output":
        gradients[1] = None
    detached = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
    torch.library.opcheck(
        torch.ops.gdn_kernels.frame_gdn_bwd.default,
        (*detached, *outputs[:2], list(outputs[6:]), *gradients, *scalars),
        test_utils=_BACKWARD_CHECKS,
    )


def test_fake_results_have_the_shapes_and_dtypes_of_real_ones_in_bf16_precision() -> None:
    arguments = [*operator_arguments("output", "bidirectional")]
    arguments[-2] = "bf16"
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    outputs = torch.ops.gdn_kernels.frame_gdn(*inputs)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ops.gdn_kernels.frame_gdn(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs))
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in outputs]
    assert any(x.dtype == torch.bfloat16 for x in outputs)


def compiled_call(dynamic: bool) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(frame_gdn, fullgraph=True, backend="aot_eager", dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_call_equals_the_eager_one_at_several_numbers_of_frames(dynamic: bool) -> None:
    call = compiled_call(dynamic)
    for frames in (2, 3):
        case = draw((1, 1, frames, 3, 8), dtype=torch.float32)
        options = {"direction": "bidirectional", "k_scale": 0.4, "eps": 0.1, "impl": "triton",
                   "output_final_state": True}  # fmt: skip
        found = []
        for function in (frame_gdn, call):
            copy = leaves(case)
            output, state = function(
                copy["qkv"], copy["beta"], copy["decay"], q_norm_weight=copy["q_norm_weight"],
                frame_valid=torch.ones(1, frames), **options,
            )  # fmt: skip
            wanted = [copy[name] for name in ("qkv", "beta", "decay", "q_norm_weight")]
            weight = torch.linspace(-1.0, 1.0, output.numel()).view(output.shape)
            grads = torch.autograd.grad((output * weight).sum() + state.kv.sum() + state.z.sum(), wanted)
            found.append([output, *state, *grads])
        for eager, compiled in zip(*found, strict=True):
            assert torch.equal(eager, compiled)


def test_dynamic_graph_is_compiled_once_for_several_numbers_of_frames() -> None:
    call = compiled_call(dynamic=True)
    counter = torch._dynamo.utils.counters
    counter.clear()
    for frames in (2, 3, 4):
        case = draw((1, 1, frames, 3, 8), dtype=torch.float32)
        call(case["qkv"], case["beta"], case["decay"], impl="triton")
    assert counter["stats"]["unique_graphs"] == 1


def test_operator_and_eager_function_give_the_same_gradients() -> None:
    case = draw(SIZES, dtype=torch.float32)
    results = run("raw", case, "bidirectional", impl="triton")
    incoming = upstream(results)
    wanted = [case[name] for name in ("qkv", "beta", "decay", "q_norm_weight", "k_norm_weight", "kv", "z")]
    names = list(results)
    eager = torch.autograd.grad([results[n] for n in names], wanted, [incoming[n] for n in names])
    weights = [case[name].view(2, 8) for name in ("q_norm_weight", "k_norm_weight")]
    tensors = FrameInputs(case["qkv"], None, None, None, case["beta"], case["decay"], *weights, case["cos"],
                          case["sin"], None)  # fmt: skip
    scalars = (True, True, False, "bidirectional", [], 0.4, 1e-5, 0.0, "ieee", True)
    outputs = torch.ops.gdn_kernels.frame_gdn(*tensors, case["kv"], case["z"], None, None, *scalars)
    order = {"numerator": 0, "denominator": 1, "final_kv": 2, "final_z": 3}
    graph = torch.autograd.grad([outputs[order[n]] for n in names], wanted, [incoming[n] for n in names])
    assert triton_op._RESULTS == 6
    for left, right in zip(eager, graph, strict=True):
        assert_close(right, left, 0.0)
