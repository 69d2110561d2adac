"""Blocks on a CUDA device: what `torch.compile` makes of them equals eager, and the two implementations agree."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gdn_models import (
    BidirectionalGDN,
    CameraBidirectionalGDN,
    CameraChunkCausalGDN,
    CameraFrameGDN,
    FrameGDN,
)

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what the compiler imports and traces
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # the compiler's advice; gates stay fp32
    # torch 2.11: what the first product of a backward's thread says of itself
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

ROWS, COLUMNS, DIM, HEADS = 6, 8, 128, 2
# 16 bits: rounding of every product's operands, half a unit of 2**-8 each, and twice that for another order of work
BF16 = 2.0**-6


def train(block: nn.Module, x: Tensor, frames: int) -> dict[str, Tensor]:
    block.zero_grad()
    x = x.detach().requires_grad_()
    y = block(x, (frames, ROWS, COLUMNS))
    y.backward(torch.cos(torch.arange(y.numel(), device="cuda").view(y.shape)).to(y.dtype))
    gradients = {name.removeprefix("_orig_mod."): p.grad.clone() for name, p in block.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        error = float((found[name].double() - value.double()).norm() / value.double().norm())
        assert error < tolerance, f"{name}: {error:.1e}"


def clip(frames: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    return torch.randn(2, frames * ROWS * COLUMNS, DIM, generator=generator).to("cuda", dtype)


@pytest.mark.parametrize("dynamic, lengths", [(False, (4,)), (True, (3, 5))], ids=["static", "dynamic"])
def test_compiled_block_equals_eager(dynamic: bool, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    block = BidirectionalGDN(dim=DIM, heads=HEADS).to("cuda", torch.bfloat16)
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for frames in lengths:
        assert_close(train(compiled, clip(frames), frames), train(block, clip(frames), frames), BF16)


def test_block_on_triton_equals_the_block_on_torch() -> None:
    torch.manual_seed(0)
    block = BidirectionalGDN(dim=DIM, heads=HEADS, impl="triton").cuda()
    reference = BidirectionalGDN(dim=DIM, heads=HEADS, impl="torch").cuda()
    reference.load_state_dict(copy.deepcopy(block.state_dict()))
    x = clip(4, torch.float32)
    # fp32 throughout; both sides round sums over a few hundred terms, in different orders
    assert_close(train(block, x, 4), train(reference, x, 4), 1e-4)


def with_camera(block: nn.Module, x: Tensor, camera: Tensor, grid: tuple[int, int, int]) -> dict[str, Tensor]:
    """Run a masked clip, and the same clip as a stream of two calls where the class has one; with gradients."""
    frames, tokens, found = grid[0], grid[1] * grid[2], {}
    valid = (torch.arange(frames) != 1).to(x.device).expand(x.shape[0], frames)
    starts = {"chunk_starts": (2,)} if block.has_chunks else {}

    def stream(y: Tensor) -> Tensor:
        state, parts = block.init_state(x.shape[0], (0, *grid[1:])), []
        for first, stop in ((0, 2), (2, frames)):
            own = y[:, first * tokens : stop * tokens], (stop - first, *grid[1:]), camera[:, first:stop]
            part, state = block(*own, state=state)
            parts.append(part)
        return torch.cat(parts, 1)

    runs = {"masked": lambda y: block(y, grid, camera, frame_valid=valid, **starts)}
    if block.can_stream:
        runs["stream"] = stream
    for name, run in runs.items():
        block.zero_grad()
        given = x.detach().requires_grad_()
        y = run(given)
        y.backward(torch.cos(torch.arange(y.numel(), device=x.device).view(y.shape)).to(y.dtype))
        found |= {f"{name}: y": y.detach(), f"{name}: x": given.grad}
        found |= {f"{name}: {key}": parameter.grad.clone() for key, parameter in block.named_parameters()}
    return found


@pytest.mark.parametrize("cls", [CameraFrameGDN, CameraBidirectionalGDN, CameraChunkCausalGDN])
def test_camera_block_on_triton_equals_the_block_on_torch(cls: type[nn.Module]) -> None:
    """Rows 7, 8 and 12 of the requirements: masks, scale of the keys and the formula of the camera, whole blocks."""
    torch.manual_seed(0)
    block = cls(dim=DIM, heads=HEADS, impl="triton").cuda()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    reference = cls(dim=DIM, heads=HEADS, impl="torch").cuda()
    reference.load_state_dict(copy.deepcopy(block.state_dict()))
    x, camera = clip(4, torch.float32), moving_camera(2, 4)
    found, expected = (with_camera(side, x, camera, (4, ROWS, COLUMNS)) for side in (block, reference))
    # fp32 throughout, as above
    assert_close(found, expected, 1e-4)


def moving_camera(batch: int, frames: int) -> Tensor:
    """Return ``[B, F, 20]``: a camera that turns about the vertical axis and moves on."""
    angle = 0.2 * torch.arange(frames, dtype=torch.float32)
    pose = torch.eye(4).repeat(frames, 1, 1)
    pose[:, 0, 0], pose[:, 0, 2] = angle.cos(), angle.sin()
    pose[:, 2, 0], pose[:, 2, 2] = -angle.sin(), angle.cos()
    pose[:, :3, 3] = angle[:, None] * torch.tensor([1.0, -0.5, 2.0])
    lens = torch.tensor([4.0, 4.0, 2.0, 2.0]).expand(frames, 4)
    return torch.cat((pose.flatten(1), lens), 1).expand(batch, frames, 20).to("cuda")


@pytest.mark.parametrize("cls", [FrameGDN, CameraFrameGDN])
def test_other_frames_tokens_and_samples_compile_nothing_new(cls: type[nn.Module]) -> None:
    """FC-P01: a stream that starts with four frames and goes on with three, and training on clips of other sizes."""
    block, compiled = cls(dim=DIM, heads=HEADS).to("cuda", torch.bfloat16), []
    camera = torch.cat((torch.eye(4).flatten(), torch.tensor([4.0, 4.0, 2.0, 2.0]))).cuda()

    def call(batch: int, frames: int, rows: int, **keywords: object) -> object:
        x = torch.randn(batch, frames * rows * COLUMNS, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        seen = (camera.expand(batch, frames, 20),) if cls is CameraFrameGDN else ()
        return block(x, (frames, rows, COLUMNS), *seen, **keywords)

    call(2, 4, ROWS).float().square().mean().backward()
    with torch.no_grad():
        _, state = call(2, 4, ROWS, state=block.init_state(2, (0, ROWS, COLUMNS)))
    kept = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **named: compiled.append(named["repr"])
    try:
        with torch.no_grad():
            for frames in (3, 3, 7):
                _, state = call(2, frames, ROWS, state=state)
        for batch, frames, rows in ((2, 3, ROWS), (2, 11, ROWS), (1, 4, ROWS), (3, 4, 5), (2, 1, 1)):
            call(batch, frames, rows).float().square().mean().backward()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = kept
    assert not compiled
