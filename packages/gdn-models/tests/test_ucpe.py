"""Ray transforms: known values, a transcription with loops, rigidity wherever a camera looks, and what is refused."""

import math

import pytest
import torch
from camera_loops import poses, rays_by_loops
from comparison import assert_close
from torch import Tensor

from gdn_models.ucpe import ray_transforms

B, F, ROWS, COLUMNS = 2, 3, 2, 4
GRID, N = (F, ROWS, COLUMNS), F * ROWS * COLUMNS
EYE = torch.eye(4, dtype=torch.float64)


def looking(rotation: Tensor = EYE[:3, :3], center: tuple = (0.0, 0.0, 0.0), lens: tuple = (1.0, 1.0, 0.0, 0.0)):
    """Return one camera ``[1, 1, 20]``."""
    pose = EYE.clone()
    pose[:3, :3], pose[:3, 3] = rotation, torch.tensor(center, dtype=torch.float64)
    return torch.cat((pose.flatten(), torch.tensor(lens, dtype=torch.float64)))[None, None]


def assert_rigid(rays: tuple[Tensor, Tensor], tolerance: float) -> None:
    """A rotation of determinant 1 with a last row of 0, 0, 0, 1; the two are inverse to one another."""
    to_ray, to_world = rays
    turn = to_ray[..., :3, :3]
    eye = EYE[:3, :3].to(turn.dtype).expand_as(turn)
    assert_close(turn @ turn.mT, eye, tolerance)
    assert_close(torch.linalg.det(turn), torch.ones_like(turn[..., 0, 0]), tolerance)
    assert torch.equal(to_world[..., :3, :3], turn.mT)
    for x in rays:
        assert torch.equal(x[..., 3, :], EYE[3].to(x.dtype).expand_as(x[..., 3, :]))
    size = to_world.abs().max().clamp(min=1)
    assert_close(to_ray @ to_world / size, EYE.to(turn.dtype).expand_as(to_ray) / size, tolerance)


@pytest.mark.parametrize("patch", [(1, 1, 1), (1, 2, 2), (4, 3, 5)])
def test_transforms_are_those_of_the_loops(patch: tuple[int, int, int]) -> None:
    camera = poses(B, F, distance=3.0)
    rays = ray_transforms(camera, GRID, patch)
    assert rays.world_to_ray.shape == rays.ray_to_world.shape == (B, N, 4, 4)
    assert_close(rays.world_to_ray, rays_by_loops(camera, GRID, patch), 1e-12)
    assert_rigid(rays, 1e-12)


def test_token_at_the_principal_point_has_the_world_to_camera_matrix() -> None:
    camera = poses(B, F, distance=2.0)
    camera[..., 18:] = torch.tensor([2.0, 1.0])  # column 2, row 1
    rays = ray_transforms(camera, GRID)
    found = rays.world_to_ray.reshape(B, F, ROWS, COLUMNS, 4, 4)[:, :, 1, 2]
    assert_close(found, torch.linalg.inv(camera[..., :16].reshape(B, F, 4, 4)), 1e-12)


def test_known_ray_of_forty_five_degrees() -> None:
    """fx = 1, one column right of the principal point: z = (1, 0, 1) / root 2, x = (1, 0, -1) / root 2, y = down."""
    rays = ray_transforms(looking(center=(5.0, 6.0, 7.0)), (1, 1, 2))
    half = math.sqrt(0.5)
    turn = torch.tensor([[half, 0, -half], [0, 1, 0], [half, 0, half]], dtype=torch.float64)
    assert_close(rays.world_to_ray[0, 1, :3, :3], turn, 1e-15)
    center = torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64)
    assert_close(rays.world_to_ray[0, 1, :3, 3], -turn @ center, 1e-15)
    assert torch.equal(rays.ray_to_world[0, 1, :3, 3], center)


def test_points_on_a_ray_lie_on_its_third_axis() -> None:
    """The centre goes to the origin, and a point seen by the token to (0, 0, distance)."""
    camera = poses(B, F, distance=4.0)
    pose, lens = camera[..., :16].reshape(B, F, 4, 4), camera[..., 16:]
    rays = ray_transforms(camera, GRID, (1, 2, 3)).world_to_ray.reshape(B, F, ROWS, COLUMNS, 4, 4)
    for row in range(ROWS):
        for column in range(COLUMNS):
            seen = torch.stack(
                (
                    (3 * column - lens[..., 2]) / lens[..., 0],
                    (2 * row - lens[..., 3]) / lens[..., 1],
                    torch.ones(B, F, dtype=torch.float64),
                ),
                -1,
            )
            far = torch.cat((7 * seen, torch.ones(B, F, 1, dtype=torch.float64)), -1)
            found = torch.einsum("bfij,bfjk,bfk->bfi", rays[:, :, row, column], pose, far)
            expected = torch.zeros_like(far)
            expected[..., 2], expected[..., 3] = 7 * seen.norm(dim=-1), 1
            assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("slant", [0.0, 1e-9, 1e-5])
def test_a_ray_along_the_vertical_axis_of_its_camera_is_a_rotation(sign: float, slant: float) -> None:
    """Row 1 at f_y of 1e-12: b is so large that the ray is the second axis; and rotations that make it one exactly."""
    camera = looking(lens=(1.0, 1e-12, -slant * 1e12, 1.0 if sign < 0 else 0.0))
    rays = ray_transforms(camera, (1, 2, 1))
    assert_rigid(rays, 1e-9)
    vertical = rays.world_to_ray[0, 0 if sign < 0 else 1, 2, :3]
    assert_close(vertical, torch.tensor([slant, sign, 0.0], dtype=torch.float64), 1e-5)
    if not slant:
        assert_close(rays.world_to_ray[0, 0 if sign < 0 else 1, 0, :3], EYE[0, :3], 1e-11)


@pytest.mark.parametrize("slant", [1e-6, 2e-6, 5e-6, 1e-5, 1e-4, 1e-3])
def test_rays_near_the_vertical_are_rigid_in_fp32(slant: float) -> None:
    """Row 1 looks ``slant`` off the second axis; the cross product with that axis loses eps / slant to cancellation."""
    cameras = torch.cat([poses(B, F)[..., :16], torch.tensor([1.0, slant, -0.6, 0.0]).expand(B, F, 4)], -1).float()
    grid, eps = (F, 2, 3), torch.finfo(torch.float32).eps
    rays = ray_transforms(cameras, grid)
    assert_rigid(rays, 16 * eps)  # as below: rotation, normalisations, sums of three
    wide = ray_transforms(cameras.double(), grid)
    found, expected = (x.world_to_ray.reshape(B, F, 2, 3, 4, 4)[..., :3, :3] for x in (rays, wide))
    assert_close(found[..., 2, :], expected[..., 2, :], 16 * eps)  # the ray itself
    assert_close(found[:, :, 0], expected[:, :, 0], 16 * eps)  # row 0 is far from the vertical


@pytest.mark.parametrize("distance", [0.0, 1e4])
def test_no_and_huge_translations_are_rigid_in_fp32(distance: float) -> None:
    camera = poses(B, F, distance=distance).float()
    rays = ray_transforms(camera, GRID)
    assert rays.world_to_ray.dtype == rays.ray_to_world.dtype == torch.float32
    assert_rigid(rays, 16 * torch.finfo(torch.float32).eps)  # rotation, three normalisations, sums of three
    if distance == 0:
        assert not rays.world_to_ray[..., :3, 3].any()


@pytest.mark.parametrize("entry", [0, 1, 5, 7, 10, 11, 16, 17, 18, 19])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_cameras_that_are_not_finite_give_finite_rays_and_leave_other_frames_alone(entry: int, junk: float) -> None:
    camera = poses(B, F)
    expected = ray_transforms(camera, GRID)
    camera[1, 1, entry] = junk
    found = ray_transforms(camera, GRID)
    broken = torch.zeros(B, F, dtype=torch.bool)
    broken[1, 1] = True
    for x, y in zip(found, expected, strict=True):
        x, y = x.reshape(B, F, -1), y.reshape(B, F, -1)
        assert torch.equal(x[~broken], y[~broken])
    assert_rigid(found, 1e-12)


@pytest.mark.parametrize("change", ["NaN", "no focal length", "no rotation", "overflow"])
def test_a_token_without_a_ray_has_the_identity(change: str) -> None:
    camera = looking(center=(1.0, 2.0, 3.0), lens=(1.0, 1.0, 0.5, 0.5)).float()
    camera[0, 0, {"NaN": 3, "no focal length": 16, "no rotation": slice(0, 11), "overflow": 3}[change]] = {
        "NaN": math.nan, "no focal length": 0.0, "no rotation": 0.0, "overflow": 3e38,
    }[change]  # fmt: skip
    if change == "overflow":
        camera[0, 0, [7, 11]] = 3e38
    for x in ray_transforms(camera, (1, 2, 2)):
        assert torch.equal(x, EYE.float().expand(1, 4, 4, 4))


def test_a_token_without_a_ray_leaves_the_other_row_of_its_frame_alone() -> None:
    """f_y = 1e-309 and c_y = 0: the slope of row 0 is 0, that of row 1 infinite."""
    rays = ray_transforms(looking(center=(1.0, 2.0, 3.0), lens=(1.0, 1e-309, 1.0, 0.0)), (1, 2, 3))
    assert torch.equal(rays.world_to_ray[:, 3:], EYE.expand(1, 3, 4, 4))
    expected = ray_transforms(looking(center=(1.0, 2.0, 3.0), lens=(1.0, 1.0, 1.0, 0.0)), (1, 1, 3))
    assert torch.equal(rays.world_to_ray[:, :3], expected.world_to_ray)


def test_geometry_is_fp32_outside_autocast_and_without_gradient() -> None:
    camera = poses(B, F).float()
    expected = ray_transforms(camera, GRID)
    with torch.autocast("cpu", torch.bfloat16):
        found = ray_transforms(camera, GRID)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
        assert not x.requires_grad
    low = ray_transforms(camera.bfloat16(), GRID)
    assert_rigid((low.world_to_ray, low.ray_to_world), 2**-5)  # the pose itself was rounded to 8 bits
    assert low.world_to_ray.dtype == torch.float32


@pytest.mark.parametrize("grid", [(0, 2, 2), (3, 0, 2), (3, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_clips_have_no_rays(batch: int, grid: tuple[int, int, int]) -> None:
    camera = poses(2, 3)[:batch, : grid[0]]
    rays = ray_transforms(camera, grid)
    assert rays.world_to_ray.shape == rays.ray_to_world.shape == (batch, math.prod(grid), 4, 4)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"camera": [1.0]}, TypeError, "^camera must be a torch.Tensor, got list$"),
        ({"camera": torch.ones(2, 3, 16)}, ValueError, r"^camera must have shape \[B, F, 20\] = \[2, 3, 20\], got"),
        ({"camera": torch.ones(2, 4, 20)}, ValueError, r"^camera must have shape \[B, F, 20\] = \[2, 3, 20\], got"),
        ({"camera": torch.tensor(1.0)}, ValueError, r"^camera must have shape \[B, F, 20\] = \[0, 3, 20\], got \[\]$"),
        ({"camera": torch.ones(2, 3, 20).int()}, ValueError, "^camera must have dtype"),
        ({"camera": torch.ones(2, 3, 20).requires_grad_()}, NotImplementedError, "^camera must not require a gradient"),
        ({"grid": (3, 2)}, TypeError, "^grid must be three ints"),
        ({"grid": (3, -1, 2)}, ValueError, "^grid must be three sizes >= 0"),
        ({"patch_size": (1, 2)}, TypeError, r"^patch_size must be three ints \(p_t, p_h, p_w\), got \(1, 2\)$"),
        ({"patch_size": (1, 2, 0)}, ValueError, r"^patch_size must be three sizes >= 1, got \(1, 2, 0\)$"),
        ({"xi": 0.5}, NotImplementedError, "^xi must be 0, a pinhole camera, got 0.5$"),
        ({"xi": "0"}, TypeError, "^xi must be a number, got str$"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ray_transforms(**{"camera": poses(2, 3), "grid": GRID, **changes})
