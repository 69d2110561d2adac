"""Arguments of the blocks: every error, before anything is computed or communicated."""

import inspect

import pytest
import torch
from torch import nn

from gdn_models import BidirectionalGDN, ChunkCausalGDN, FrameGDN

B, F, H, C, GRID = 2, 5, 3, 12, (5, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error_class", "message"),
    [
        ((torch.zeros(B, 10), GRID), {}, ValueError, r"x must have shape \[B, N, C\], got \[2, 10\]"),
        ((torch.zeros(B, 9, C), GRID), {}, ValueError,
         r"x must have shape \[B, N = F\*h\*w, C = dim\] = \[2, 10, 12\], got \[2, 9, 12\]"),
        ((torch.zeros(B, 10, C + 1), GRID), {}, ValueError, r"= \[2, 10, 12\], got \[2, 10, 13\]"),
        ((torch.zeros(B, 10, C, dtype=torch.float64), GRID), {}, ValueError, r"x must have dtype float32, got float64"),
        ((torch.zeros(B, 10, C, device="meta"), GRID), {}, ValueError,
         r"x must be on the device of the parameters \(cpu\), got meta"),
        ((torch.zeros(B, 10, C), (-5, 2, -1)), {}, ValueError, r"grid must be three sizes >= 0, got \(-5, 2, -1\)"),
        ((torch.zeros(B, 10, C), (5, 2)), {}, TypeError, r"grid must be three ints \(F, h, w\), got \(5, 2\)"),
        ((torch.zeros(B, 10, C), torch.tensor(GRID)), {}, TypeError, r"grid must be three ints"),
        ((torch.zeros(B, 10, C), (5.0, 2, 1)), {}, TypeError, r"grid must be three ints"),
        (([1.0], GRID), {}, TypeError, r"x must be a torch.Tensor, got list"),
        ((torch.zeros(B, 10, C), GRID), {"frame_valid": torch.ones(B, F + 1)}, ValueError,
         r"frame_valid must have shape \[B, F\] = \[2, 5\], \[B, 1, F\] or \[B, 1, F, 1, 1\], got \[2, 6\]"),
        ((torch.zeros(B, 10, C), GRID), {"frame_valid": torch.ones(B, F, dtype=torch.int64)}, ValueError,
         r"frame_valid must have dtype bool, float16"),
        ((torch.zeros(B, 10, C), GRID), {"frame_valid": torch.ones(B, F, device="meta")}, ValueError,
         r"frame_valid must be on the device of x \(cpu\), got meta"),
        ((torch.zeros(B, 10, C), GRID), {"frame_valid": torch.ones(B, F, requires_grad=True)}, ValueError,
         r"frame_valid must not require a gradient"),
        ((torch.zeros(B, 10, C), GRID), {"frame_valid": [1.0]}, TypeError, r"frame_valid must be a torch.Tensor"),
        ((torch.zeros(B, 10, C), GRID), {"chunk_starts": (2, 2)}, ValueError, r"strictly increasing, got \(2, 2\)"),
        ((torch.zeros(B, 10, C), GRID), {"chunk_starts": (3, 2)}, ValueError, r"strictly increasing, got \(3, 2\)"),
        ((torch.zeros(B, 10, C), GRID), {"chunk_starts": (0, 5)}, ValueError, r"must lie in 0 ... F - 1 = 4"),
        ((torch.zeros(B, 10, C), GRID), {"chunk_starts": (-1,)}, ValueError, r"must lie in 0 ... F - 1 = 4"),
        ((torch.zeros(B, 10, C), GRID), {"chunk_starts": torch.tensor([0, 2])}, TypeError, r"tuple of ints or None"),
    ],
)  # fmt: skip
def test_argument_errors(arguments: tuple, keywords: dict, error_class: type[Exception], message: str) -> None:
    with pytest.raises(error_class, match=message):
        ChunkCausalGDN(dim=C, heads=H)(*arguments, **keywords)


@pytest.mark.parametrize("cls", [FrameGDN, BidirectionalGDN])
@pytest.mark.parametrize("starts", [(0,), (0, 2)])
def test_classes_without_chunks_refuse_chunk_starts(cls: type[nn.Module], starts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"chunk_starts must be None for {cls.__name__}, which has no chunks"):
        cls(dim=C, heads=H)(torch.zeros(B, 10, C), GRID, chunk_starts=starts)


def test_an_implementation_that_cannot_run_raises() -> None:
    with pytest.raises(NotImplementedError, match="triton"):
        FrameGDN(dim=C, heads=H, impl="triton")(torch.zeros(B, 10, C), GRID)


def test_a_norm_over_channels_of_which_the_block_holds_some_is_refused() -> None:
    """Heads of a wider block: their projections read all of its channels."""
    for qk_norm in (False, True):
        block = BidirectionalGDN(dim=C, heads=H, output_gate=False, qk_norm=qk_norm)
        block.qkv, block.beta_proj, block.gate_proj = (nn.Linear(2 * C, width) for width in (3 * C, H, H))
        if not qk_norm:
            assert block(torch.zeros(B, 10, 2 * C), GRID).shape == (B, 10, C)
            continue
        with pytest.raises(NotImplementedError, match="^qk_norm over 24 channels, of which this block holds 12, is"):
            block(torch.zeros(B, 10, 2 * C), GRID)


def test_forward_has_no_open_ended_arguments() -> None:
    parameters = inspect.signature(FrameGDN.forward).parameters
    assert list(parameters) == ["self", "x", "grid", "chunk_starts", "frame_valid", "state", "partition"]
    assert all(p.kind == p.KEYWORD_ONLY for name, p in parameters.items() if name in list(parameters)[3:])
