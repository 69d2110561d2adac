"""Parameters and arguments of the blocks with a camera branch."""

import copy
import inspect
import re

import pytest
import torch
from camera_loops import poses
from comparison import assert_close, randomize
from torch import nn

from gdn_kernels import RayTransforms, frame_gdn_raw
from gdn_models import (
    BidirectionalGDN,
    CameraBidirectionalGDN,
    CameraChunkCausalGDN,
    CameraFrameGDN,
    CameraGDNConfig,
    CameraState,
    FrameGDN,
    FrameGDNConfig,
    camera_block,
    load_published,
    published_state_dict,
    ray_transforms,
)

B, F, H, C, GRID = 2, 5, 3, 24, (5, 2, 1)


def test_parameters_have_the_published_names_shapes_and_initial_values() -> None:
    block = CameraBidirectionalGDN(dim=24, heads=3, conv_qv=True, conv_size=3)
    identity = torch.tensor([0.0, 0.0, 1.0]).expand(24, 1, 3)
    expected = {
        **{f"{name}_proj_cam.weight": (24, 24) for name in "qkv"},
        **{f"{name}_proj_cam.bias": torch.zeros(24) for name in "qkv"},
        "out_proj_cam.weight": torch.zeros(24, 24), "out_proj_cam.bias": torch.zeros(24),
        "q_norm_cam.weight": torch.ones(24), "k_norm_cam.weight": torch.ones(24),
        **{f"conv_{name}_cam.weight": identity for name in "qkv"},
    }  # fmt: skip
    state = block.state_dict()
    plain = BidirectionalGDN(dim=24, heads=3, conv_qv=True, conv_size=3).state_dict()
    assert state.keys() == expected.keys() | plain.keys()
    for name, value in expected.items():
        if isinstance(value, tuple):
            bound = (6 / sum(value)) ** 0.5  # Xavier uniform over [out, in]
            assert state[name].shape == value
            assert 0.9 * bound < state[name].abs().max() <= bound
        else:
            assert torch.equal(state[name], value), name


def test_keys_of_absent_parts_are_absent_and_classes_share_theirs() -> None:
    default = set(CameraFrameGDN(dim=C, heads=H).state_dict())
    bare = set(CameraFrameGDN(dim=C, heads=H, qk_norm=False, conv_size=0).state_dict())
    assert {name for name in default - bare if "_cam" in name} == {
        "q_norm_cam.weight", "k_norm_cam.weight", "conv_k_cam.weight"
    }  # fmt: skip
    source = CameraFrameGDN(dim=C, heads=H)
    for cls in (CameraBidirectionalGDN, CameraChunkCausalGDN):
        cls(source.config).load_state_dict(source.state_dict(), strict=True)


def test_reset_parameters_is_idempotent_and_repairs_a_model_wide_initialisation() -> None:
    block, results = CameraChunkCausalGDN(dim=C, heads=H, conv_qv=True), []
    for spoil in (lambda p: None, nn.init.normal_, nn.init.ones_):
        for parameter in block.parameters():
            spoil(parameter)
        torch.manual_seed(7)
        block.reset_parameters()
        results.append(copy.deepcopy(block.state_dict()))
    for other in results[1:]:
        assert all(torch.equal(value, other[name]) for name, value in results[0].items())


def test_at_initialisation_the_branch_is_silent_and_its_output_projection_alone_learns() -> None:
    block, x = CameraBidirectionalGDN(dim=C, heads=H).double(), torch.randn(B, F * 2, C, dtype=torch.float64)
    y = block(x, GRID, poses(B, F))
    assert torch.equal(y, block(x, GRID))
    y.sin().sum().backward()
    for name, parameter in block.named_parameters():
        if "_cam" in name:
            assert parameter.grad is not None
            assert parameter.grad.any() == name.startswith("out_proj_cam"), name


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_init_camera_from_main_copies_everything_but_the_output_projection(qkv_bias: bool) -> None:
    block = CameraFrameGDN(dim=C, heads=H, conv_qv=True, qkv_bias=qkv_bias).double()
    randomize(block)
    before = copy.deepcopy(block.state_dict())
    block.init_camera_from_main()
    after = block.state_dict()
    expected = {
        **{f"{x}_proj_cam.weight": before["qkv.weight"][i * C : (i + 1) * C] for i, x in enumerate("qkv")},
        **{
            f"{x}_proj_cam.bias": before["qkv.bias"][i * C : (i + 1) * C] if qkv_bias else torch.zeros(C).double()
            for i, x in enumerate("qkv")
        },
        **{f"{x}_norm_cam.weight": before[f"{x}_norm.weight"] for x in "qk"},
        **{f"conv_{x}_cam.weight": before[f"conv_{x}.weight"] for x in "qkv"},
    }
    for name, value in after.items():
        assert torch.equal(value, expected.get(name, before[name])), name
    bare = CameraFrameGDN(dim=C, heads=H, conv_size=0, qk_norm=False)
    bare.init_camera_from_main()
    assert torch.equal(bare.k_proj_cam.weight, bare.qkv.weight[C : 2 * C])


def test_a_copied_branch_equals_the_main_one_where_rays_are_the_identity_and_nothing_turns() -> None:
    """What it adds is the numerator alone of the main branch's own q, k and v."""
    block = CameraBidirectionalGDN(dim=C, heads=H, rope_theta=None, output_gate=False, conv_size=0).double()
    randomize(block)
    block.init_camera_from_main()
    x, still = torch.randn(B, F * 2, C, dtype=torch.float64), torch.eye(4).expand(B, F * 2, 4, 4)
    found = block(x, GRID, RayTransforms(still, still)) - block(x, GRID)
    with torch.no_grad():
        own = torch.stack([layer(x) for layer in (block.q_proj_cam, block.k_proj_cam, block.v_proj_cam)], 2)
        assert_close(own, block.qkv(x).unflatten(-1, (3, C)), 1e-14)
        numerator = frame_gdn_raw(
            own.unflatten(-1, (H, C // H)), *block._gates(x, block._checked(x, GRID, None, None, None, None)),
            direction="bidirectional", q_norm_weight=block.q_norm.weight, k_norm_weight=block.k_norm.weight,
            k_scale=(C / H * 2) ** -0.5, norm_eps=block.config.norm_eps,
        ).numerator  # fmt: skip
        assert_close(found, block.out_proj_cam(numerator.flatten(2)) @ block.proj.weight.T, 1e-12)


def test_published_checkpoints_of_camera_blocks_load_strictly() -> None:
    block, other = (CameraChunkCausalGDN(dim=C, heads=H) for _ in range(2))
    randomize(block)
    exported = published_state_dict(block)
    assert set(exported) - set(block.state_dict()) == {"recall_gate"}
    load_published(other, exported)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in block.state_dict().items())
    with pytest.raises(ValueError, match=r"missing .*k_norm_cam.weight"):
        load_published(other, published_state_dict(CameraChunkCausalGDN(dim=C, heads=H, qk_norm=False)))
    with pytest.raises(NotImplementedError, match="convolutions with a bias are not supported, got conv_k_cam.bias"):
        load_published(other, {**exported, "conv_k_cam.bias": torch.zeros(C)})


def test_config_or_fields_of_the_camera_config() -> None:
    assert CameraFrameGDN(CameraGDNConfig(dim=C, heads=H)).config == CameraFrameGDN(dim=C, heads=H).config
    with pytest.raises(TypeError, match="^CameraFrameGDN takes a CameraGDNConfig or the fields of one, got FrameGDNCo"):
        CameraFrameGDN(FrameGDNConfig(dim=C, heads=H))
    assert FrameGDN(CameraGDNConfig(dim=C, heads=H)).config.patch_size == (1, 1, 1)
    assert CameraFrameGDN(dim=C, heads=H, patch_size=(1, 2, 2)).extra_repr() == "dim=24, heads=3, patch_size=(1, 2, 2)"


X, CAMERA = torch.zeros(B, 10, C), poses(B, F).float()
RAYS = ray_transforms(CAMERA, GRID)


@pytest.mark.parametrize(
    ("camera", "kind", "message"),
    [
        (CAMERA[..., :16], ValueError, r"^camera must have shape \[B, F, 20\] = \[2, 5, 20\], got \[2, 5, 16\]$"),
        (CAMERA[:1], ValueError, r"^camera must have shape \[B, F, 20\] = \[2, 5, 20\], got \[1, 5, 20\]$"),
        (CAMERA.int(), ValueError, "^camera must have dtype"),
        (CAMERA.to("meta"), ValueError, r"^camera must be on the device of x \(cpu\), got meta$"),
        (CAMERA.clone().requires_grad_(), NotImplementedError, "^camera must not require a gradient"),
        ([1.0], TypeError, "^camera must be a torch.Tensor, got list$"),
        (tuple(RAYS), TypeError, "^camera must be a torch.Tensor, got tuple$"),
        (RAYS._replace(ray_to_world=RAYS[1][:, 1:]), ValueError,
         r"^camera.ray_to_world must have shape \[B, N, 4, 4\] = \[2, 10, 4, 4\], got \[2, 9, 4, 4\]$"),
        (RAYS._replace(world_to_ray=RAYS[0].half()), ValueError, "^camera.world_to_ray must have dtype float32, float"),
        (RAYS._replace(world_to_ray=RAYS[0].to("meta")), ValueError, "^camera.world_to_ray must be on the device of x"),
        (RAYS._replace(ray_to_world=RAYS[1].clone().requires_grad_()), NotImplementedError,
         "^camera.ray_to_world must not require a gradient"),
    ],
)  # fmt: skip
def test_cameras_that_are_refused(camera: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        CameraChunkCausalGDN(dim=C, heads=H)(X, GRID, camera)


def test_errors_of_the_main_branch_are_those_of_the_blocks_without_a_camera() -> None:
    with pytest.raises(ValueError, match="chunk_starts must be None for CameraFrameGDN, which has no chunks"):
        CameraFrameGDN(dim=C, heads=H)(X, GRID, CAMERA, chunk_starts=(0,))
    with pytest.raises(ValueError, match=r"x must have shape \[B, N = F\*h\*w, C = dim\]"):
        CameraFrameGDN(dim=C, heads=H)(X[:, 1:], GRID, CAMERA)
    with pytest.raises(NotImplementedError, match="CameraBidirectionalGDN reads the whole clip both ways"):
        CameraBidirectionalGDN(dim=C, heads=H).init_state(B, GRID)


@pytest.mark.parametrize("kind", [CameraFrameGDN, CameraBidirectionalGDN, CameraChunkCausalGDN])
def test_triton_that_cannot_run_is_refused_before_any_work(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    block = kind(dim=C, heads=H, impl="triton")
    x = X.float()
    block.register_module("q_proj_cam", None)  # a projection that runs fails in another way
    monkeypatch.setattr(block, "_run_both", None)
    with pytest.raises(NotImplementedError, match="^impl=.triton. needs tensors on a GPU, got cpu; use impl="):
        block.float()(x, GRID, CAMERA)


@pytest.mark.parametrize("asked", ["auto", "torch"])
def test_implementation_is_passed_on_to_every_operation_of_the_camera(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = []
    for name in ("camera_operands", "frame_gdn_numerator", "camera_output"):
        function = getattr(camera_block, name)

        def spy(*tensors: object, function: object = function, **options: object) -> object:
            passed.append(options["impl"])
            return function(*tensors, **options)

        monkeypatch.setattr(camera_block, name, spy)
    CameraFrameGDN(dim=C, heads=H, impl=asked)(X, GRID, CAMERA)
    assert passed == [asked] * 3


def test_states_that_are_refused() -> None:
    block = CameraFrameGDN(dim=C, heads=H)
    state = block.init_state(B, GRID)
    assert block(X, GRID, CAMERA, state=state)[1].frames == F
    camera = state.camera
    with pytest.raises(ValueError, match="^state.camera must be None: the stream began without a camera$"):
        block(X, GRID, state=state)
    with pytest.raises(ValueError, match="^state.camera must be a CameraState: the stream began with a camera$"):
        block(X, GRID, CAMERA, state=state._replace(camera=None))
    for wrong, kind, message in (
        (tuple(camera), TypeError, "state.camera must be a CameraState or None, got tuple"),
        (CameraState(camera.kv[:, :1], camera.conv), ValueError, r"state.camera.kv must have shape \[B, H, D, D\] = "),
        (CameraState(camera.kv.double(), camera.conv), ValueError, "state.camera.kv must have dtype float32"),
        (CameraState(camera.kv, (None, None, None)), ValueError, "state.camera.conv of k must be a tensor for this bl"),
        (CameraState(camera.kv, (None, camera.conv[1][:, 1:], None)), ValueError, "state.camera.conv of k must have"),
    ):
        with pytest.raises(kind, match=f"^{message}"):
            block(X, GRID, CAMERA, state=state._replace(camera=wrong))
    with pytest.raises(NotImplementedError, match="state together with frame_valid is not supported"):
        block(X, GRID, CAMERA, state=state, frame_valid=torch.ones(B, F))
    with pytest.raises(ValueError, match="state.camera must be None for FrameGDN, which has no camera branch"):
        FrameGDN(dim=C, heads=H)(X, GRID, state=state)


def test_forward_has_no_open_ended_arguments() -> None:
    parameters = inspect.signature(CameraFrameGDN.forward).parameters
    assert list(parameters) == ["self", "x", "grid", "camera", "chunk_starts", "frame_valid", "state", "partition"]
    assert all(p.kind == p.KEYWORD_ONLY for name, p in parameters.items() if name in list(parameters)[4:])


def test_every_parameter_of_the_branch_is_in_the_table_of_the_class() -> None:
    """Documentation: names in the docstring are names of parameters, and the other way round."""
    block = CameraFrameGDN(dim=C, heads=H, conv_qv=True)
    listed = set(re.findall(r"``([a-z_{},]+_cam)\.weight``", CameraFrameGDN.__doc__))
    found = {name.removesuffix(".weight") for name in block.state_dict() if name.endswith("_cam.weight")}
    expanded = {x.replace("{q,k,v}", letter) for x in listed for letter in "qkv"}
    assert expanded == found
