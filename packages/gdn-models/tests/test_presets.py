"""Presets make the blocks they name, at the sizes they name."""

from __future__ import annotations

import pytest
import torch

import gdn_models
from gdn_models import (
    BidirectionalGDN,
    CameraBidirectionalGDN,
    CameraChunkCausalGDN,
    CameraGDNConfig,
    ChunkCausalGDN,
    FrameGDN,
    FrameGDNConfig,
    GatedDeltaProduct,
    Preset,
    preset,
)
from gdn_models.presets import PRESETS

SIZES = {
    **dict.fromkeys(("sana_wm_720p", "sana_wm_720p_chunk", "sana_wm_stream", "sana_v2v_stream"), (2240, 20, 112)),
    "wide_d128": (2560, 20, 128),
    "tiny": (64, 2, 32),
}
CLASSES = {
    "sana_wm_720p": CameraBidirectionalGDN,
    "sana_wm_720p_chunk": CameraChunkCausalGDN,
    "sana_wm_stream": CameraChunkCausalGDN,
    "wide_d128": BidirectionalGDN,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_its_block(name: str) -> None:
    found = preset(name)
    block = found.make(device="meta", dtype=torch.bfloat16)
    config = block.config
    assert (config.dim, config.heads, config.head_dim) == SIZES[name]
    assert (config.qkv_bias, config.qk_norm, config.norm_eps, config.eps) == (False, True, 1e-5, 1e-8)
    assert (config.conv_size, config.conv_qv, config.key_scale, config.rope_theta) == (4, False, "dim_spatial", 1e4)
    assert config.output_gate
    assert config.precision is None
    assert block.qkv.weight.dtype == torch.bfloat16
    assert block.qkv.weight.device.type == "meta"
    assert type(block) is CLASSES.get(name, ChunkCausalGDN)
    assert getattr(config, "patch_size", (1, 1, 1)) == (1, 1, 1)


def test_the_presets_of_sana_wm_have_its_clips_and_chunks() -> None:
    whole, chunks, stream = (preset(name) for name in ("sana_wm_720p", "sana_wm_720p_chunk", "sana_wm_stream"))
    assert whole.grid() == chunks.grid() == (121, 22, 40)
    assert whole.chunk_starts(121) is None
    assert chunks.chunk_starts(121) == (0, *range(4, 119, 3))
    assert (stream.frames, stream.chunk_starts(3)) == ((4, 3), None)


def test_the_streaming_preset_streams_in_steps_of_four_and_three_frames() -> None:
    found = preset("sana_v2v_stream")
    assert found.frames == (4, 3)
    assert found.grid() == (4, 22, 40)
    assert found.grid(3) == (3, 22, 40)
    assert found.chunk_starts(4) is None


def test_the_tiny_preset_runs() -> None:
    found = preset("tiny")
    assert found.chunk_starts(6) == (0, 3)
    block, x = found.make(), torch.randn(2, 24, 64)
    y = block(x, found.grid(), chunk_starts=found.chunk_starts(6))
    changed = x.clone()
    changed[:, 12:] += 1  # the second chunk
    again = block(changed, found.grid(), chunk_starts=found.chunk_starts(6))
    assert torch.equal(y[:, :12], again[:, :12])
    assert not torch.equal(y[:, 12:], again[:, 12:])


def cameras(frames: int) -> torch.Tensor:
    return torch.cat((torch.eye(4).flatten(), torch.tensor([2.0, 2.0, 1.0, 1.0]))).expand(2, frames, 20)


@pytest.mark.parametrize("cls", [FrameGDN, BidirectionalGDN, ChunkCausalGDN])
@pytest.mark.parametrize("seen", [False, True], ids=["plain", "camera"])
def test_the_tiny_preset_is_for_every_class(cls: type[FrameGDN], seen: bool) -> None:
    if seen:
        cls = getattr(gdn_models, f"Camera{cls.__name__}")
    found = preset("tiny").with_block(cls)
    assert found.chunk_starts(6) == ((0, 3) if cls.has_chunks else None)
    assert (found.name, found.grid(), type(found.config)) == ("tiny", (6, 2, 2), cls.config_kind)
    block, keywords = found.make(), {"chunk_starts": found.chunk_starts(6)} if cls.has_chunks else {}
    assert type(block) is cls
    assert (block.config.dim, block.config.heads, block.config.head_dim) == SIZES["tiny"]
    rest = (cameras(6),) if seen else ()
    assert block(torch.randn(2, 24, 64), found.grid(), *rest, **keywords).shape == (2, 24, 64)


def test_another_class_keeps_every_option_that_it_has() -> None:
    config = CameraGDNConfig(
        dim=32, heads=2, qkv_bias=True, conv_qv=True, eps=0.5, precision="ieee", patch_size=(1, 2, 2)
    )
    wide = Preset("own", CameraChunkCausalGDN, config, (2, 2), (5,), 2, "first_frame")
    narrow = wide.with_block(ChunkCausalGDN)
    fields = FrameGDNConfig.__dataclass_fields__
    assert type(narrow.config) is FrameGDNConfig
    assert [getattr(narrow.config, name) for name in fields] == [getattr(config, name) for name in fields]
    assert (narrow.chunk_size, narrow.chunk_mode, narrow.frames, narrow.spatial) == (2, "first_frame", (5,), (2, 2))
    assert wide.with_block(CameraChunkCausalGDN) == wide


@pytest.mark.parametrize("other", [GatedDeltaProduct, "FrameGDN", None])
def test_what_is_no_class_of_blocks(other: object) -> None:
    with pytest.raises(TypeError, match="^block must be a class such as FrameGDN, got "):
        preset("tiny").with_block(other)


def test_names_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="name must be one of .*'sana_v2v_stream', 'wide_d128', 'tiny', got 'small'"):
        preset("small")
    assert isinstance(preset("tiny"), Preset)
