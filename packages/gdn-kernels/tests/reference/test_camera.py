"""The camera branch's operands and output against loops over tokens, and what is known of them."""

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same, assert_zero, error
from camera_cases import B, D, F, H, N, S, angles, camera_by_loops, operands, output_by_loops, rigid_rays
from torch import Tensor

from gdn_kernels import RayTransforms
from gdn_kernels.reference.camera import camera_operands_reference, camera_output_reference

TOLERANCE = 1e-12  # fp64, sums of at most H*D terms


def gradients(results: dict[str, Tensor], upstream: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    total = sum((results[name] * upstream[name]).sum() for name in upstream)
    found = torch.autograd.grad(total, list(inputs.values()), retain_graph=True)
    return dict(zip(inputs, found, strict=True))


@pytest.mark.parametrize("distance", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("weights", ["both", "q", "none"])
@pytest.mark.parametrize("rotates", [True, False])
def test_operands_and_every_gradient_match_the_loops(distance: float, weights: str, rotates: bool) -> None:
    q, k, v = operands()
    rays, tables = rigid_rays(B, N, distance), angles(N, D) if rotates else None
    q_weight, k_weight = (torch.randn(H, D, dtype=torch.float64).requires_grad_() for _ in range(2))
    given = {"both": (q_weight, k_weight), "q": (q_weight, None), "none": (None, None)}[weights]
    inputs = {"q": q, "k": k, "v": v, "q_weight": given[0], "k_weight": given[1]}
    inputs = {name: x for name, x in inputs.items() if x is not None}
    arguments = (q, k, v, rays, F, tables, *given, 0.7, 0.1)
    found, expected = camera_operands_reference(*arguments)._asdict(), camera_by_loops(*arguments)
    assert_all_close(found, expected, TOLERANCE)
    upstream = {name: torch.randn_like(x) for name, x in expected.items()}
    assert_all_close(gradients(found, upstream, inputs), gradients(expected, upstream, inputs), TOLERANCE)
    only = {"inflation": upstream["inflation"]}
    # without translations keys keep their length: the gradient is the rounding of two terms that cancel
    if distance:
        alone = {"k": k} | ({"k_weight": given[1]} if given[1] is not None else {})
        assert_all_close(gradients(found, only, alone), gradients(expected, only, alone), TOLERANCE)


@pytest.mark.parametrize("rotates", [True, False])
def test_output_and_its_gradient_match_the_loops(rotates: bool) -> None:
    x, rays, tables = operands()[0], rigid_rays(B, N, 3.0), angles(N, D) if rotates else None
    found, expected = camera_output_reference(x, rays, tables, x.dtype), output_by_loops(x, rays, tables)
    assert_close(found, expected, TOLERANCE)
    dy = torch.randn_like(found)
    assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (found, expected)), TOLERANCE)


@pytest.mark.parametrize("width", [8, 24, 40, 72, 112, 128])
def test_every_width_that_is_a_multiple_of_eight(width: int) -> None:
    q, k, v = operands(width=width, heads=1)
    arguments = (q, k, v, rigid_rays(B, N, 1.0), F, angles(N, width), None, None, 1.0, 0.0)
    assert_all_close(camera_operands_reference(*arguments)._asdict(), camera_by_loops(*arguments), TOLERANCE)


def test_another_world_frame_changes_neither_scores_nor_what_values_arrive_as() -> None:
    """Moving the world by G multiplies P by the inverse of G on the right, and everything cancels."""
    q, k, v = (x.detach() for x in operands())
    rays, moved_by = rigid_rays(B, N, 1.0), rigid_rays(1, 1, 2.0, seed=9)
    moved = RayTransforms(rays.world_to_ray @ moved_by.ray_to_world, moved_by.world_to_ray @ rays.ray_to_world)
    results = []
    for given in (rays, moved):
        got = camera_operands_reference(q, k, v, given, F, angles(N, D), None, None, 1.0, 0.0)
        scores = torch.einsum("bihd,bjhd->bhij", got.q, got.k)
        read = torch.einsum("bhij,bjhd->bihd", scores, got.v)
        results.append((scores, camera_output_reference(read, given, angles(N, D), read.dtype)))
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, 1e-12)


def test_one_token_reading_itself_gets_its_value_back() -> None:
    """P P^-1 = 1 and the rotations cancel."""
    v = operands()[2].detach()
    got = camera_operands_reference(v, v, v, rigid_rays(B, N, 2.0), F, angles(N, D), None, None, 1.0, 0.0)
    assert_close(camera_output_reference(got.v, rigid_rays(B, N, 2.0), angles(N, D), v.dtype), v, 1e-13)


def test_the_transform_of_the_output_is_the_adjoint_of_that_of_queries() -> None:
    """<q', x> = <q, x'> for queries without features: what is read and what asks go through one matrix."""
    q, x = operands()[0].detach().abs(), operands()[1].detach()
    rays, tables = rigid_rays(B, N, 2.0), angles(N, D)
    asked = camera_operands_reference(q, q, q, rays, F, tables, None, None, 1.0, 0.0).q
    assert_close((asked * x).sum(), (q * camera_output_reference(x, rays, tables, x.dtype)).sum(), 1e-12)


def test_inflation_of_a_known_translation() -> None:
    """k = (0, 0, 0, 1) and a ray centre at distance 3: the key becomes (t, 1), of squared length 10."""
    still = torch.eye(4, dtype=torch.float64).expand(1, 2, 4, 4)
    moved = still.clone()
    moved[:, 1, :3, 3] = torch.tensor([1.0, 2.0, 2.0])
    k = torch.zeros(1, 2, 1, 8, dtype=torch.float64)
    k[..., 3] = 1
    got = camera_operands_reference(k, k, k, RayTransforms(moved, moved), 1, None, None, None, 1.0, 0.0)
    assert_same(got.inflation, torch.tensor([[[5.5]]], dtype=torch.float64))


def test_keys_below_the_floor_have_ratio_one_and_no_gradient() -> None:
    k = torch.full((1, 4, 1, 8), 1e-8, dtype=torch.float64)
    k[:, 2:] = 0
    k.requires_grad_()
    got = camera_operands_reference(k, k, k, rigid_rays(1, 4, 1.0), 2, None, None, None, 1.0, 0.0)
    assert_same(got.inflation, torch.ones(1, 1, 2, dtype=torch.float64))
    assert_zero(torch.autograd.grad(got.inflation.sum(), k)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_are_rounded_once_and_inflation_is_wide(dtype: torch.dtype) -> None:
    q, k, v = operands(dtype)
    rays, tables = RayTransforms(*(x.float() for x in rigid_rays(B, N, 1.0))), angles(N, D)
    weight = torch.ones(H, D)
    found = camera_operands_reference(q, k, v, rays, F, tables, weight, weight, 0.7, 1e-5)
    wide = [x.detach().double() for x in (q, k, v)]
    expected = camera_operands_reference(*wide, rays, F, tables, weight, weight, 0.7, 1e-5)
    single = torch.finfo(torch.float32).eps
    for name in ("q", "k", "v"):
        assert getattr(found, name).dtype == dtype
        assert_close(getattr(found, name), getattr(expected, name), torch.finfo(dtype).eps / 2 + 2 * H * D * single)
    assert found.inflation.dtype == torch.float32
    assert_close(found.inflation, expected.inflation, 2 * (H * D + S) * single)
    sum(x.float().sum() for x in found).backward()
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == dtype


def test_strides_of_inputs_and_autocast_do_not_matter() -> None:
    """FC-S12, FC-A08."""
    wide = torch.randn(H, B, N, 3, 2 * D)
    q, k, v = (wide[:, :, :, i, ::2].permute(1, 2, 0, 3) for i in range(3))
    rays = RayTransforms(*(x.float() for x in rigid_rays(B, N, 1.0)))
    rest = (rays, F, angles(N, D), torch.ones(H, D), None, 1.0, 1e-5)
    expected = camera_operands_reference(q.contiguous(), k.contiguous(), v.contiguous(), *rest)
    with torch.autocast("cpu", torch.bfloat16):
        found = camera_operands_reference(q, k, v, *rest)
    assert max(error(a, b) for a, b in zip(found, expected, strict=True)) < 8 * H * D * torch.finfo(torch.float32).eps
    assert {x.dtype for x in found} == {torch.float32}


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 0), (1, 1, 1)])
def test_nothing_to_do_gives_empty_results(shape: tuple[int, int, int]) -> None:
    """FC-S08."""
    batch, frames, spatial = shape
    x = torch.randn(batch, frames * spatial, H, D, dtype=torch.float64, requires_grad=True)
    rays = rigid_rays(batch, frames * spatial, 1.0)
    got = camera_operands_reference(x, x, x, rays, frames, None, None, None, 1.0, 0.0)
    assert got.k.shape == x.shape
    assert got.inflation.shape == (batch, H, frames)
    assert got.inflation.isfinite().all()
    sum(y.sum() for y in got).backward()
    assert x.grad.isfinite().all()
