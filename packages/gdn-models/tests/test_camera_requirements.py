"""What published implementations got wrong about the camera branch, one test each; weights are random throughout."""

import copy

import camera_loops
import pytest
import torch
from block_loops import block_by_loops, scale_of, visible_ends
from camera_loops import camera_by_loops, poses
from comparison import assert_close, error, gradients, randomize
from torch import Tensor, nn

from gdn_models import CameraBidirectionalGDN, CameraChunkCausalGDN, CameraFrameGDN, chunk_schedule

H, D, ROWS, COLUMNS = 2, 8, 1, 2
C, S = H * D, ROWS * COLUMNS
CLASSES = [
    pytest.param(CameraFrameGDN, "causal", id="causal"),
    pytest.param(CameraBidirectionalGDN, "bidirectional", id="bidirectional"),
    pytest.param(CameraChunkCausalGDN, "chunks", id="chunks"),
]


def make(cls: type[nn.Module], dtype: torch.dtype = torch.float64, **options: object) -> nn.Module:
    """Return a block whose weights depend on their shapes alone."""
    torch.manual_seed(1)
    block = cls(**{"dim": C, "heads": H, "qkv_bias": True, "conv_qv": True, **options}).to(dtype)
    randomize(block)
    return block


def clip(frames: int, batch: int = 1, channels: int = C) -> Tensor:
    return torch.randn(batch, frames * S, channels, dtype=torch.float64)


def loops(
    block: nn.Module, x: Tensor, camera: Tensor, kind: str, starts: tuple[int, ...] = (), valid: Tensor | None = None
) -> Tensor:
    """Run the transcription on ``x [B, F*S, C]`` of the module grid."""
    config, frames = block.config, x.shape[1] // S
    p, grid = dict(block.named_parameters()), (frames, ROWS, COLUMNS)
    options = {
        "heads": config.heads, "ends": visible_ends(kind, starts, frames), "norm_eps": config.norm_eps,
        "key_scale": scale_of(config.key_scale, config.head_dim, S), "theta": config.rope_theta, "valid": valid,
    }  # fmt: skip
    added = camera_by_loops(p, x, grid, camera, patch=config.patch_size, **options)
    return block_by_loops(p, x, grid, eps=config.eps, added=added, **options)


def loops_of_camera(block: nn.Module, x: Tensor, camera: Tensor) -> Tensor:
    """Run the transcription of the camera branch alone, causal: ``[B, F, S, C]`` before the last projection."""
    config, frames = block.config, x.shape[1] // S
    return camera_loops.camera_by_loops(
        dict(block.named_parameters()), x, (frames, ROWS, COLUMNS), camera, heads=config.heads,
        ends=visible_ends("causal", (), frames), key_scale=scale_of(config.key_scale, config.head_dim, S),
    )  # fmt: skip


def camera_part(block: nn.Module, x: Tensor, grid: tuple, camera: Tensor, **keywords: object) -> Tensor:
    """Return what the camera adds: in a block without an output gate the difference to the main branch alone."""
    assert block.output_gate is None
    return block(x, grid, camera, **keywords) - block(x, grid, **keywords)


def changed_frames(block: nn.Module, x: Tensor, camera: Tensor, frame: int, starts: tuple | None) -> list[int]:
    """Return the frames whose camera branch changes, in any bit, when a camera does; x, main branch and gates stay."""
    frames = x.shape[1] // S
    keywords = {} if starts is None else {"chunk_starts": starts}
    other = camera.clone()
    other[:, frame] = poses(x.shape[0], 1, seed=77)[:, 0]
    difference = block(x, (frames, ROWS, COLUMNS), camera, **keywords) != block(
        x, (frames, ROWS, COLUMNS), other, **keywords
    )
    return difference.reshape(x.shape[0], frames, -1).any(-1).any(0).nonzero().flatten().tolist()


@pytest.mark.parametrize("starts", [None, (0,), (), chunk_schedule(7, 9)])
def test_row_4_a_clip_of_one_chunk_equals_the_bidirectional_block(starts: tuple[int, ...] | None) -> None:
    block, x, camera = make(CameraChunkCausalGDN), clip(7, 2), poses(2, 7)
    other = CameraBidirectionalGDN(block.config).double()
    other.load_state_dict(block.state_dict())
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]).bool()
    for valid in (None, mask):
        found = block(x, (7, ROWS, COLUMNS), camera, chunk_starts=starts, frame_valid=valid)
        assert torch.equal(found, other(x, (7, ROWS, COLUMNS), camera, frame_valid=valid))


@pytest.mark.parametrize("starts", [(0, 1, 5, 9), (1, 5, 9)])
def test_row_5_an_explicit_start_list_means_what_it_says(starts: tuple[int, ...]) -> None:
    """F = 12 is divisible by a chunk size of 4; the future changes nothing before it."""
    block, x, camera = make(CameraChunkCausalGDN), clip(12), poses(1, 12)
    found = block(x, (12, ROWS, COLUMNS), camera, chunk_starts=starts)
    assert_close(found, loops(block, x, camera, "chunks", (1, 5, 9)), 1e-10)
    bounds = [0, 1, 5, 9, 12]
    for first, stop in zip(bounds, bounds[1:], strict=False):
        for frame in range(first, stop):
            assert changed_frames(block, x, camera, frame, starts) == list(range(first, 12))


def test_row_6_chunks_of_one_frame_work_and_alone_are_the_causal_block() -> None:
    block, x, camera, grid = make(CameraChunkCausalGDN), clip(6), poses(1, 6), (6, ROWS, COLUMNS)
    found = block(x, grid, camera, chunk_starts=(0, 1, 2, 3))
    assert_close(found, loops(block, x, camera, "chunks", (1, 2, 3)), 1e-10)
    causal = CameraFrameGDN(block.config).double()
    causal.load_state_dict(block.state_dict())
    assert_close(block(x, grid, camera, chunk_starts=tuple(range(6))), causal(x, grid, camera), 1e-12)


def test_a_camera_of_a_later_frame_does_not_reach_an_earlier_one() -> None:
    x, camera = clip(5), poses(1, 5)
    for frame in range(5):
        assert changed_frames(make(CameraFrameGDN), x, camera, frame, None) == list(range(frame, 5))
        assert changed_frames(make(CameraBidirectionalGDN), x, camera, frame, None) == list(range(5))


@pytest.mark.parametrize("frame", range(6))
@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_row_7_a_reset_survives_an_invalid_frame_at_a_chunk_start(cls: type[nn.Module], kind: str, frame: int) -> None:
    starts = (2, 4) if kind == "chunks" else ()
    block, x, camera, valid = make(cls), clip(6), poses(1, 6), torch.ones(1, 6, dtype=torch.bool)
    valid[0, frame] = False
    keywords = {"chunk_starts": starts} if starts else {}
    found = block(x, (6, ROWS, COLUMNS), camera, frame_valid=valid, **keywords)
    assert_close(found, loops(block, x, camera, kind, starts, valid), 1e-10)


@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_row_7_right_padding_changes_nothing(cls: type[nn.Module], kind: str) -> None:
    block, x, camera = make(cls), clip(5, 2), poses(2, 8)
    starts = (2, 5, 6) if kind == "chunks" else None
    padded, valid = torch.cat((x, 1e3 * clip(3, 2)), 1), (torch.arange(8) < 5).expand(2, 8)
    keywords = {} if starts is None else {"chunk_starts": starts}
    found = block(padded, (8, ROWS, COLUMNS), camera, frame_valid=valid, **keywords)
    shorter = {} if starts is None else {"chunk_starts": (2,)}
    assert_close(found[:, : 5 * S], block(x, (5, ROWS, COLUMNS), camera[:, :5], **shorter), 1e-12)
    assert not found[:, 5 * S :].any()


@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_row_8_key_scale_is_honoured(cls: type[nn.Module], kind: str) -> None:
    x, camera, results = clip(4), poses(1, 4), []
    for mode in ("dim_spatial", "dim", "none"):
        block = make(cls, key_scale=mode, output_gate=False)
        results.append(camera_part(block, x, (4, ROWS, COLUMNS), camera))
        assert_close(block(x, (4, ROWS, COLUMNS), camera), loops(block, x, camera, kind), 1e-10, mode)
    for i in range(3):
        assert error(results[i], results[i - 1]) > 1e-3


@pytest.mark.parametrize("distance", [0.0, 1e4])
def test_row_11_degenerate_cameras_give_finite_results_and_gradients(distance: float) -> None:
    """Rays along the vertical axis of the camera, no and huge translations; a bad camera leaves the other sample."""
    block, x, camera = make(CameraBidirectionalGDN), clip(4, 2), poses(2, 4, distance=distance)
    camera[0, 1, 17], camera[0, 1, 19] = 1e-12, 1.0
    expected = block(x, (4, ROWS, COLUMNS), camera)
    expected.square().sum().backward()
    assert expected.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(block).values())
    camera[0, 2] = float("nan")
    found = block(x, (4, ROWS, COLUMNS), camera)
    assert found.isfinite().all()
    assert torch.equal(found[1], expected[1])
    assert error(found[0], expected[0]) > 1e-4


@pytest.mark.parametrize("distance", [0.0, 10.0, 1e3])
@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_row_12_the_formula_holds_for_large_translations(cls: type[nn.Module], kind: str, distance: float) -> None:
    block, x, camera = make(cls), clip(5), poses(1, 5, distance=distance)
    # rounding of P_i P_j^-1 and its inverse grows with the square of the distance
    tolerance = 1e-10 * max(1.0, distance**2 / 1e4)
    assert_close(block(x, (5, ROWS, COLUMNS), camera), loops(block, x, camera, kind), tolerance)


@pytest.mark.parametrize("frames", [3, 40])
def test_row_12_far_cameras_do_not_make_the_recurrence_expand(frames: int) -> None:
    """With the discount the camera's state stays of the order of what one frame writes, whatever the distance."""
    block, x, sizes = make(CameraFrameGDN, conv_size=0, conv_qv=False), clip(frames), []
    for distance in (1e2, 1e4):
        state = block.init_state(1, (0, ROWS, COLUMNS))
        camera = poses(1, frames, distance=distance)
        sizes.append(block(x, (frames, ROWS, COLUMNS), camera, state=state)[1].camera.kv.abs().max())
        assert sizes[-1] < 1e3
    assert sizes[1] < 10 * sizes[0]


def test_row_13_the_camera_norm_uses_norm_eps() -> None:
    x, camera, results = clip(4), poses(1, 4), []
    for norm_eps in (1e-5, 0.1, 10.0):
        block = make(CameraBidirectionalGDN, norm_eps=norm_eps, output_gate=False)
        results.append(camera_part(block, x, (4, ROWS, COLUMNS), camera))
        assert_close(block(x, (4, ROWS, COLUMNS), camera), loops(block, x, camera, "bidirectional"), 1e-10)
    assert min(error(results[0], results[1]), error(results[1], results[2])) > 1e-3


def test_row_14_the_decay_has_its_gradient_at_zero_and_at_the_first_frame_of_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gates of exactly 0, exactly 1 and between, as leaves; a clip in two calls against the transcription in one."""
    block = make(CameraFrameGDN, output_gate=False)
    x, camera, beta = clip(6), poses(1, 6), torch.rand(1, H, 6, S, dtype=torch.float64)
    decay = torch.tensor([[0.9, 0.0, 1.0, 0.9, 0.0, 1.0], [1.0, 0.9, 0.9, 0.0, 1.0, 0.9]], dtype=torch.float64)[None]
    leaves = [decay.clone().requires_grad_() for _ in range(2)]
    monkeypatch.setattr(camera_loops, "gates_by_loops", lambda p, y: (beta, leaves[1]))
    expected = loops_of_camera(block, x, camera) @ block.proj.weight.T
    parts, given = [], None
    for first in (0, 3):
        gates = beta[:, :, first : first + 3], leaves[0][:, :, first : first + 3]
        monkeypatch.setattr(block, "_gates", lambda y, c, gates=gates: gates)
        given = block.init_state(1, (0, ROWS, COLUMNS)) if given is None else given
        call = x[:, first * S : (first + 3) * S], (3, ROWS, COLUMNS)
        both, after = block(*call, camera[:, first : first + 3], state=given)
        parts.append(both - block(*call, state=given._replace(camera=None))[0])
        given = after
    found = torch.cat(parts, 1)
    assert_close(found, expected.flatten(1, 2), 1e-10)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.flatten(1, 2).backward(upstream)
    assert_close(leaves[0].grad, leaves[1].grad, 1e-10)
    at = leaves[0].grad[decay == 0]
    assert at.abs().min() > 1e-6, "a decay of 0 has a gradient"
    assert leaves[0].grad[:, :, 3].abs().min() > 1e-6, "so has the frame that meets the incoming state"


@pytest.mark.parametrize("width", [8, 40, 72, 112])
@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_row_19_head_widths_that_are_no_power_of_two(cls: type[nn.Module], kind: str, width: int) -> None:
    """FC-S16."""
    block, camera = make(cls, dim=H * width), poses(1, 3)
    x = clip(3, channels=H * width).requires_grad_()
    copied = x.detach().clone().requires_grad_()
    found, expected = block(x, (3, ROWS, COLUMNS), camera), loops(block, copied, camera, kind)
    assert_close(found, expected, 1e-10)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    assert_close(x.grad, copied.grad, 1e-10)


@pytest.mark.parametrize("shape", [(2, 0, 2, 2), (0, 3, 2, 2), (2, 1, 2, 2), (2, 3, 1, 1), (2, 1, 1, 1), (2, 3, 0, 2)])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_row_19_smallest_sizes_run_forward_and_backward(
    cls: type[nn.Module], kind: str, heads: int, shape: tuple[int, ...]
) -> None:
    """FC-S04, FC-S08: (B, F, h, w) with nothing, or one thing, in it."""
    batch, *grid = shape
    block = make(cls, torch.float32, heads=heads)
    x = torch.randn(batch, grid[0] * grid[1] * grid[2], C, requires_grad=True)
    camera = poses(2, 3)[:batch, : grid[0]].float()
    y = block(x, tuple(grid), camera)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.isfinite().all()
    for name, gradient in gradients(block).items():
        assert gradient.isfinite().all(), name
        assert x.numel() or not gradient.any(), name


@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_row_22_gates_get_a_gradient_from_the_camera_branch_alone(cls: type[nn.Module], kind: str) -> None:
    """No values in the main branch: what gates get comes from the camera, and is that of the transcription."""
    block, camera = make(cls), poses(2, 5)
    starts, x = (2, 3) if kind == "chunks" else (), clip(5, 2)
    with torch.no_grad():
        block.qkv.weight[2 * C :] = 0
        block.qkv.bias[2 * C :] = 0
    other, upstream = copy.deepcopy(block), torch.randn_like(x)
    keywords = {"chunk_starts": starts} if starts else {}
    (block(x, (5, ROWS, COLUMNS), camera, **keywords) * upstream).sum().backward()
    (loops(other, x, camera, kind, starts) * upstream).sum().backward()
    for name in ("A_log", "dt_bias", "gate_proj.weight", "gate_proj.bias", "beta_proj.weight", "beta_proj.bias"):
        found, expected = (gradients(side)[name] for side in (block, other))
        assert found.abs().min() > 1e-9, name
        assert_close(found, expected, 1e-10, name)


@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_row_22_every_parameter_gets_the_gradient_that_finite_differences_give(cls: type[nn.Module], kind: str) -> None:
    block, x, camera = make(cls), clip(5, 2), poses(2, 5)
    keywords = {"chunk_starts": (2, 3)} if kind == "chunks" else {}
    upstream = torch.randn_like(x)

    def loss() -> Tensor:
        return (block(x, (5, ROWS, COLUMNS), camera, **keywords) * upstream).sum()

    loss().backward()
    step = 1e-6
    for name, gradient in gradients(block).items():
        assert gradient.abs().max() > 0, name
        parameter = block.get_parameter(name)
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            parameter += step * direction
            above = loss()
            parameter -= 2 * step * direction
            below = loss()
            parameter += step * direction
        slope, expected = (above - below) / (2 * step), (gradient * direction).sum()
        # rounding of the two losses over the step, and the cubic term of the expansion
        tolerance = float(2**-52 * (above.abs() + below.abs()) * 100 / step + 1e-6 * gradient.norm() * direction.norm())
        assert abs(slope - expected) < tolerance, f"{name}: {float(slope)} against {float(expected)}"


def test_row_17_rotary_positions_of_the_branch_continue_in_a_stream() -> None:
    """A second call at position 0 again would give another result: rotation of rows and columns is not shift-free."""
    block, x, camera = make(CameraFrameGDN), clip(6), poses(1, 6)
    state = block.init_state(1, (0, ROWS, COLUMNS))
    _, state = block(x[:, : 4 * S], (4, ROWS, COLUMNS), camera[:, :4], state=state)
    found, _ = block(x[:, 4 * S :], (2, ROWS, COLUMNS), camera[:, 4:], state=state)
    expected = block(x, (6, ROWS, COLUMNS), camera)[:, 4 * S :]
    assert_close(found, expected, 1e-12)
    wrong, _ = block(x[:, 4 * S :], (2, ROWS, COLUMNS), camera[:, 4:], state=state._replace(frames=0))
    assert error(wrong, expected) > 1e-4


@pytest.mark.parametrize("autocast", [False, True])
def test_row_21_error_of_16_bits_does_not_grow_with_the_clip(autocast: bool) -> None:
    """FC-N05: the branch's state and strengths are fp32 inside; a decay of 0.9933 in 16 bits would be far off."""
    block = make(CameraFrameGDN, torch.float32, conv_size=0, conv_qv=False, output_gate=False)
    with torch.no_grad():
        block.beta_proj.bias.fill_(-6.0)  # writes little
        block.beta_proj.weight.zero_()
        block.dt_bias.fill_(-5.0)  # and remembers long
        block.gate_proj.weight.zero_()
        block.gate_proj.bias.zero_()
        block.A_log.zero_()
        block.proj.weight.copy_(torch.eye(C))
        block.qkv.weight[2 * C :].zero_()  # no values in the main branch: the output is the camera's alone
        for bias in (block.qkv.bias[2 * C :], block.proj.bias, block.out_proj_cam.bias):
            bias.zero_()
    if not autocast:
        block.bfloat16()
    exact, errors = copy.deepcopy(block).double(), {}
    for frames in (11, 120):
        # cameras that stand still, so that what frames write adds up as it does in the main branch
        x, camera = clip(frames, 16).bfloat16(), poses(16, 1, distance=0.3).expand(-1, frames, -1)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = block(x, (frames, ROWS, COLUMNS), camera).double()[:, -S:]
        wanted = exact(x.double(), (frames, ROWS, COLUMNS), camera).detach()[:, -S:]
        errors[frames] = float((y - wanted).norm() / wanted.norm())
    assert errors[120] < 1.5 * errors[11], errors
