"""The public functions of the camera branch: that they pass on what they are given, and what they refuse."""

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same
from camera_cases import B, D, F, H, N, angles, camera_by_loops, operands, output_by_loops, rigid_rays

from gdn_kernels import Impl, RayTransforms, RotaryTables, camera_operands, camera_output, frame_gdn_numerator
from gdn_kernels.camera import op

RAYS, TABLES = rigid_rays(B, N, 1.0), angles(N, D)


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_operands_are_those_of_the_loops(impl: str) -> None:
    q, k, v = operands()
    weights = torch.randn(2, H * D, dtype=torch.float64)
    found = camera_operands(
        q, k, v, RAYS, frames=F, rope=TABLES, q_norm_weight=weights[0], k_norm_weight=weights[1], k_scale=0.3,
        norm_eps=0.2, impl=impl,
    )  # fmt: skip
    expected = camera_by_loops(q, k, v, RAYS, F, TABLES, *weights, 0.3, 0.2)
    assert_all_close(found._asdict(), expected, 1e-12)


def test_output_is_that_of_the_loops_in_the_dtype_asked_for() -> None:
    x = operands()[0].detach()
    assert_close(camera_output(x, RAYS, rope=TABLES, impl="torch"), output_by_loops(x, RAYS, TABLES), 1e-12)
    assert_same(camera_output(x, RAYS, dtype=torch.bfloat16), camera_output(x, RAYS).bfloat16())


def test_discounted_strength_keeps_far_cameras_from_expanding() -> None:
    """The trace of a frame's write operator is the sum of beta |k|^2: with the discount about what it was before."""
    q, k, v = (x.detach() for x in operands())
    beta, decay = torch.ones(B, H, F, N // F, dtype=torch.float64), torch.ones(B, H, F, dtype=torch.float64)
    far = rigid_rays(B, N, 1e3)
    got = camera_operands(q, k, v, far, frames=F, q_norm_weight=torch.ones(H * D), k_scale=(D * N / F) ** -0.5)
    assert (got.inflation > 1e3).all()
    grown = frame_gdn_numerator(*got[:3], beta, decay, output_final_state=True).final_state
    kept = frame_gdn_numerator(*got[:3], beta / got.inflation[..., None], decay, output_final_state=True).final_state
    assert grown.abs().max() > 1e6 * kept.abs().max()


def _replaced(**changes: object) -> dict[str, object]:
    q, k, v = (x.detach() for x in operands())
    return {"q": q, "k": k, "v": v, "rays": RAYS, "frames": F, **changes}


WRONG = [
    ({"q": [1.0]}, TypeError, "^q must be a torch.Tensor, got list$"),
    ({"q": torch.ones(2, 3, 4)}, ValueError, r"^q must have shape \[B, N, H, D\], got \[2, 3, 4\]$"),
    ({"q": torch.ones(B, N, H, D).long()}, ValueError, "^q must have dtype"),
    (
        {"q": torch.ones(B, N, H, 12)},
        ValueError,
        r"^q must have shape \[B, N, H, D\] with H >= 1 and D a multiple of 8, got \[2, 15, 2, 12\]$",
    ),
    ({"q": torch.ones(B, N, 0, 8)}, ValueError, "H >= 1 and D a multiple of 8"),
    ({"k": torch.ones(B, N, H, 8, dtype=torch.float64)}, ValueError, r"^k must have shape \[B, N, H, D\] = "),
    ({"v": torch.ones(B, N, H, D)}, ValueError, "^v must have dtype float64, got float32$"),
    ({"k": torch.ones(B, N, H, D, dtype=torch.float64, device="meta")}, ValueError, "^k must be on the device of q"),
    ({"rays": tuple(RAYS)}, TypeError, r"^rays must be RayTransforms\(world_to_ray, ray_to_world\), got tuple$"),
    (
        {"rays": RAYS._replace(ray_to_world=RAYS[0][:, 1:])},
        ValueError,
        r"^rays.ray_to_world must have shape \[B, N, 4, 4\] = \[2, 15, 4, 4\], got \[2, 14, 4, 4\]$",
    ),
    ({"rays": RayTransforms(*(x.half() for x in RAYS))}, ValueError, "^rays.world_to_ray must have dtype float32, f"),
    ({"rays": RAYS._replace(world_to_ray=RAYS[0].to("meta"))}, ValueError, "^rays.world_to_ray must be on the device"),
    (
        {"rays": RAYS._replace(world_to_ray=RAYS[0].clone().requires_grad_())},
        NotImplementedError,
        "^rays.world_to_ray must not require a gradient: cameras are not differentiated$",
    ),
    ({"rope": TABLES[0]}, TypeError, r"^rope must be RotaryTables\(cos, sin\), got Tensor$"),
    ({"rope": angles(N, 2 * D)}, ValueError, r"^rope.cos must have shape \[N, D/4\] = \[15, 4\], got \[15, 8\]$"),
    ({"rope": RotaryTables(TABLES[0].half(), TABLES[1])}, ValueError, "^rope.cos must have dtype float32, float64"),
    ({"rope": RotaryTables(TABLES[0].to("meta"), TABLES[1])}, ValueError, "^rope.cos must be on the device of q"),
    (
        {"rope": RotaryTables(TABLES[0], TABLES[1].clone().requires_grad_())},
        ValueError,
        "^rope.sin must not require a gradient$",
    ),
    ({"impl": "cuda"}, ValueError, "^impl must be one of 'auto', 'torch', 'triton', got 'cuda'$"),
    (
        {"impl": "triton"},
        NotImplementedError,
        '^impl="triton" supports fp16, bf16 and fp32, got float64; use impl="torch"$',
    ),
]
WRONG_OPERANDS = [
    ({"q_norm_weight": 1.0}, TypeError, "^q_norm_weight must be a torch.Tensor, got float$"),
    ({"k_norm_weight": torch.ones(D)}, ValueError, r"^k_norm_weight must have shape \[H\*D\] = \[32\], got \[16\]$"),
    ({"k_norm_weight": torch.ones(H * D).int()}, ValueError, "^k_norm_weight must have dtype"),
    ({"q_norm_weight": torch.ones(H * D, device="meta")}, ValueError, "^q_norm_weight must be on the device of q"),
    ({"frames": 3.0}, TypeError, "^frames must be an int, got float$"),
    ({"frames": 4}, ValueError, "^frames must be >= 0 and divide N = 15, got 4$"),
    ({"frames": 0}, ValueError, "^frames must be >= 0 and divide N = 15, got 0$"),
    ({"frames": -3}, ValueError, "^frames must be >= 0 and divide N = 15, got -3$"),
    ({"k_scale": 0.0}, ValueError, "^k_scale must be a finite number > 0, got 0.0$"),
    ({"norm_eps": -1.0}, ValueError, "^norm_eps must be a finite number >= 0, got -1.0$"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG + WRONG_OPERANDS)
def test_operands_refuse(changes: dict[str, object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        camera_operands(**_replaced(**changes))


@pytest.mark.parametrize(("changes", "kind", "message"), [case for case in WRONG if not {"k", "v"} & case[0].keys()])
def test_output_refuses(changes: dict[str, object], kind: type[Exception], message: str) -> None:
    given = _replaced(**changes)
    with pytest.raises(kind, match=message.replace("q must", "x must").replace("of q", "of x")):
        camera_output(given["q"], given["rays"], rope=given.get("rope"), impl=given.get("impl", "auto"))


def test_output_refuses_dtypes_that_are_not_floating() -> None:
    with pytest.raises(ValueError, match="^dtype must be float16, bfloat16, float32 or float64, got torch.int64$"):
        camera_output(operands()[0], RAYS, dtype=torch.int64)


def _in_fp32(width: int) -> dict[str, object]:
    q, k, v = (x.detach() for x in operands(torch.float32, width=width))
    return {"q": q, "k": k, "v": v, "rays": RAYS, "frames": F, "impl": "triton"}


@pytest.mark.parametrize(
    ("width", "message"), [(264, "supports D up to 256, got D = 264"), (16, "needs tensors on a GPU, got cpu")]
)
def test_triton_that_cannot_run_refuses(width: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = _in_fp32(width)
    with pytest.raises(NotImplementedError, match=f'^impl="triton" {message}; use impl="torch"$'):
        camera_operands(**given)
    with pytest.raises(NotImplementedError, match=f'^impl="triton" {message}; use impl="torch"$'):
        camera_output(given["q"], RAYS, impl="triton")


def test_triton_that_is_not_installed_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(op, "_HAS_TRITON", False)
    with pytest.raises(NotImplementedError, match="needs the package triton, which is not installed"):
        camera_operands(**_in_fp32(16))


def test_auto_takes_triton_on_a_gpu_and_torch_for_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_HAS_TRITON", True)  # the choice, not what is installed here
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert op.choose_impl("auto", torch.bfloat16, gpu, 112) is Impl.TRITON
    assert op.choose_impl("auto", torch.float64, gpu, 112) is Impl.TORCH
    assert op.choose_impl("auto", torch.float32, cpu, 112) is Impl.TORCH
