"""The flat buffer of one rank and pass."""

import torch

from gdn_cp.wire import WireLayout


def test_blocks_start_on_sixteen_bytes_and_come_back():
    layout = WireLayout(("a", "b", "c"), ((2, 3), (1,), (5,)), torch.float32)
    assert layout.sizes == (6, 1, 5)
    assert layout.offsets == (0, 8, 12, 20)
    blocks = [torch.randn(shape) for shape in layout.shapes]
    buffer = layout.pack(blocks, torch.device("cpu"))
    for block, found in zip(blocks, layout.unpack(buffer).values(), strict=True):
        assert torch.equal(block, found)
    gathered = torch.stack([buffer, 2 * buffer])
    assert torch.equal(layout.unpack(gathered)["b"][1], 2 * blocks[1])


def test_unpacked_blocks_are_views():
    layout = WireLayout(("a",), ((2, 2),), torch.float64)
    buffer = layout.pack([torch.ones(2, 2)], torch.device("cpu"))
    layout.unpack(buffer)["a"].zero_()
    assert not buffer.any()
