"""The kernels of the camera branch in the interpreter, every flag, against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same
from camera_cases import angles, rigid_rays
from requirements import require_interpreter
from torch import Tensor
from triton_against_torch import LAYOUTS, Strided, as_is, one_number_expanded

require_interpreter()
from gdn_kernels import RayTransforms, RotaryTables, camera_operands, camera_output  # noqa: E402
from gdn_kernels.camera import blocks  # noqa: E402

pytestmark = pytest.mark.interpret
EPS = torch.finfo(torch.float32).eps
NAMES = ("q", "k", "v", "inflation")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens and two heads a block, one program per share: several blocks, heads and programs in a tiny case."""
    row = {256: blocks.CameraBlock(2, 2, 1, 3)}
    monkeypatch.setattr(blocks, "TABLE", dict.fromkeys(blocks.KERNELS, row))


def run(
    impl: str, q: Tensor, k: Tensor, v: Tensor, weights: list[Tensor | None], rays: RayTransforms,
    rope: RotaryTables | None, frames: int, incoming: list[Tensor | None],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Return results, and the gradients of q, k, v and the weights that are there."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    given = [None if w is None else w.detach().requires_grad_() for w in weights]
    got = camera_operands(
        *leaves, rays, frames=frames, rope=rope, q_norm_weight=given[0], k_norm_weight=given[1], k_scale=0.3,
        norm_eps=0.2, impl=impl,
    )  # fmt: skip
    outputs = [x for x, g in zip(got, incoming, strict=True) if g is not None]
    upstream = [g.to(x.dtype) for x, g in zip(got, incoming, strict=True) if g is not None]
    wanted = {name: x for name, x in zip(("q", "k", "v", "wq", "wk"), (*leaves, *given), strict=True) if x is not None}
    found = torch.autograd.grad(outputs, list(wanted.values()), upstream, materialize_grads=True)
    return {name: x.detach() for name, x in zip(NAMES, got, strict=True)}, dict(zip(wanted, found, strict=True))


def assert_agrees(
    shape: tuple[int, int, int, int, int], *, weights: str = "qk", rope: bool = True, silent: str = "",
    distance: float = 1.0, layout: Strided = as_is, upstream_layout: Strided = as_is,
) -> None:  # fmt: skip
    """Compare with the reference in fp64: eight times the error that the reference makes in fp32, at least 4 ulp."""
    batch, frames, spatial, heads, width = shape
    tokens = frames * spatial
    operands = [layout(torch.randn(batch, tokens, heads, width)) for _ in range(3)]
    norm = [torch.randn(heads * width) if name in weights else None for name in "qk"]
    rays = rigid_rays(batch, tokens, distance)
    rays = RayTransforms(*(x.float() for x in rays))
    tables = RotaryTables(*(x.float() for x in angles(tokens, width))) if rope else None
    incoming: list[Tensor | None] = [upstream_layout(torch.randn(batch, tokens, heads, width)) for _ in range(3)]
    incoming.append(torch.randn(frames, heads, batch).permute(2, 1, 0))
    incoming = [None if name in silent else x for name, x in zip("qkvi", incoming, strict=True)]
    wide = [x.double() for x in operands]
    wide_norm = [None if w is None else w.double() for w in norm]
    exact, exact_gradients = run("torch", *wide, wide_norm, rays, tables, frames, incoming)
    rounded, rounded_gradients = run("torch", *operands, norm, rays, tables, frames, incoming)
    found, gradients = run("triton", *operands, norm, rays, tables, frames, incoming)
    for expected, low, got in ((exact, rounded, found), (exact_gradients, rounded_gradients, gradients)):
        for name, value in expected.items():
            scale = max(float(value.abs().max()), 1e-30) if value.numel() else 1.0
            error = float((low[name].double() - value).abs().max()) / scale if value.numel() else 0.0
            assert_close(got[name], value, 8.0 * max(4 * EPS, error), name)
            assert got[name].dtype == torch.float32


@pytest.mark.parametrize("width", [8, 16, 24, 40])
def test_widths_agree_with_fp64(width: int) -> None:
    assert_agrees((2, 2, 2, 3, width))


@pytest.mark.parametrize("weights", ["", "q", "k"])
@pytest.mark.parametrize("rope", [True, False])
def test_weights_and_tables_may_be_left_out(weights: str, rope: bool) -> None:
    assert_agrees((1, 2, 2, 2, 16), weights=weights, rope=rope)


@pytest.mark.parametrize("silent", ["i", "qv", "kvi", "qki", "qkv"])
def test_gradients_flow_from_any_subset_of_results(silent: str) -> None:
    assert_agrees((1, 2, 3, 2, 8), silent=silent)


def test_cameras_far_away_inflate_as_in_fp64() -> None:
    assert_agrees((1, 2, 2, 2, 16), distance=1e4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_of_any_strides(layout: Strided) -> None:
    assert_agrees((2, 1, 3, 2, 8), layout=layout)


@pytest.mark.parametrize("layout", [*LAYOUTS, one_number_expanded])
def test_incoming_gradients_of_any_strides(layout: Strided) -> None:
    assert_agrees((2, 1, 3, 2, 8), upstream_layout=layout)


@pytest.mark.parametrize("shape", [(0, 2, 2, 2, 8), (2, 0, 1, 2, 8), (2, 3, 0, 2, 8), (1, 1, 1, 1, 8)])
def test_nothing_and_the_least_are_prepared(shape: tuple[int, int, int, int, int]) -> None:
    if shape[0] * shape[1] * shape[2]:
        assert_agrees(shape)
        return
    batch, frames, spatial, heads, width = shape
    q = torch.zeros(batch, frames * spatial, heads, width, requires_grad=True)
    w = torch.ones(heads * width, requires_grad=True)
    eye = torch.eye(4).expand(batch, frames * spatial, 4, 4)
    rays = RayTransforms(eye, eye)
    got = camera_operands(q, q, q, rays, frames=frames, q_norm_weight=w, impl="triton")
    assert_same(got.inflation, torch.zeros(batch, heads, frames))
    out = camera_output(got.q, rays, impl="triton")
    dq, dw = torch.autograd.grad(out.sum() + got.inflation.sum(), (q, w))
    assert dq.shape == q.shape
    assert_same(dw, torch.zeros_like(w))


def test_keys_at_the_floor_of_the_ratio_get_the_reference_gradient() -> None:
    """Keys shorter than 1e-6 before and after, and a token of zeros."""
    k = 1e-8 * torch.rand(1, 4, 2, 8)
    k[:, 1] = 0.0
    k[:, 2] *= 1e8
    rays = RayTransforms(*(x.float() for x in rigid_rays(1, 4, 3.0)))
    found = {}
    for impl, leaf in (("torch", k.double()), ("triton", k)):
        leaf = leaf.requires_grad_()
        got = camera_operands(leaf, leaf, leaf, rays, frames=2, impl=impl)
        (grad,) = torch.autograd.grad(got.inflation.sum(), leaf)
        found[impl] = {"inflation": got.inflation.detach(), "grad": grad}
    assert_all_close(found["triton"], found["torch"], 64 * EPS)


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("layout", [as_is, *LAYOUTS])
def test_output_and_its_gradient_agree_with_fp64(rope: bool, layout: Strided) -> None:
    x = layout(torch.randn(2, 3, 3, 24))
    rays = RayTransforms(*(t.float() for t in rigid_rays(2, 3, 2.0)))
    tables = RotaryTables(*(t.float() for t in angles(3, 24))) if rope else None
    g = layout(torch.randn(2, 3, 3, 24))
    found = {}
    for impl, leaf in (("torch", x.double()), ("triton", x)):
        leaf = leaf.detach().requires_grad_()
        y = camera_output(leaf, rays, rope=tables, impl=impl)
        found[impl] = {"y": y.detach(), "dx": torch.autograd.grad(y, leaf, g.to(y.dtype))[0]}
    assert_all_close(found["triton"], found["torch"], 32 * EPS)  # four products and their sums, translations of 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_output_takes_the_dtype_asked_for(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 2, 8, requires_grad=True)
    rays = RayTransforms(*(t.float() for t in rigid_rays(1, 2, 1.0)))
    y = camera_output(x, rays, dtype=dtype, impl="triton")
    assert y.dtype == dtype
    assert_close(y, camera_output(x.double(), rays), 8 * max(EPS, torch.finfo(dtype).eps))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.dtype == torch.float32


def test_fp16_operands_are_rounded_once() -> None:
    q = torch.randn(1, 4, 2, 16).half()
    rays = RayTransforms(*(t.float() for t in rigid_rays(1, 4, 1.0)))
    w = torch.rand(32).half()
    low, exact = (
        camera_operands(x, x, x, rays, frames=2, q_norm_weight=w.to(x.dtype), impl=impl)
        for x, impl in ((q, "triton"), (q.double(), "torch"))
    )
    bound = 2.0**-11 + 32 * EPS
    for found, value in zip(low[:3], exact[:3], strict=True):
        scale = float(value.abs().max())
        assert ((found.double() - value).abs() <= bound * value.abs() + 32 * EPS * scale).all()
    assert low.inflation.dtype == torch.float32


def test_autocast_changes_nothing() -> None:
    x = torch.randn(1, 4, 2, 8)
    rays = RayTransforms(*(t.float() for t in rigid_rays(1, 4, 1.0)))
    plain = camera_operands(x, x, x, rays, frames=2, q_norm_weight=torch.ones(16), impl="triton")
    with torch.autocast("cpu", torch.bfloat16):
        found = camera_operands(x, x, x, rays, frames=2, q_norm_weight=torch.ones(16), impl="triton")
    for a, b in zip(found, plain, strict=True):
        assert_same(a, b)


def _arguments(norm: bool, rope: bool) -> tuple[Any, ...]:
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    weights = [torch.randn(2, 8, requires_grad=True) if norm else None for _ in range(2)]
    rays = [t.float() for t in rigid_rays(1, 4, 1.0)]
    tables = [t.float() for t in angles(4, 8)] if rope else [None, None]
    return (q, k, v, *weights, *rays, *tables, 2, 0.3, 0.2)


_FORWARD = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(("norm", "rope"), [(True, True), (False, False)])
def test_operators_pass_opcheck(norm: bool, rope: bool) -> None:
    check: Callable[..., Any] = torch.library.opcheck
    arguments = _arguments(norm, rope)
    check(torch.ops.gdn_kernels.camera_operands.default, arguments, test_utils=_FORWARD)
    q, k, v, wq, wk, *rest = (x.detach() if isinstance(x, Tensor) else x for x in arguments)
    *results, rho_q, rho_k = torch.ops.gdn_kernels.camera_operands(q, k, v, wq, wk, *rest)
    back = (q, k, wq, wk, *rest[:4], rho_q, rho_k, *results[:2], None, results[3], *rest[4:])
    check(
        torch.ops.gdn_kernels.camera_operands_bwd.default, back, test_utils=("test_schema", "test_faketensor")
    )  # fmt: skip
    x = arguments[0]
    check(
        torch.ops.gdn_kernels.camera_output.default, (x, rest[0], rest[2], rest[3], torch.float16, False),
        test_utils=_FORWARD,
    )  # fmt: skip
