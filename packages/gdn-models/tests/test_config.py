"""The frame-wise configurations: defaults, and an error for every value that is not allowed."""

import dataclasses

import pytest

from gdn_kernels import Impl, Precision
from gdn_models import CameraGDNConfig, FrameGDNConfig


def test_config_has_the_documented_defaults() -> None:
    config = FrameGDNConfig(dim=64, heads=2)
    assert dataclasses.asdict(config) == {
        "dim": 64, "heads": 2, "qkv_bias": False, "output_gate": True, "conv_size": 4, "conv_qv": False,
        "qk_norm": True, "norm_eps": 1e-5, "eps": 1e-8, "key_scale": "dim_spatial", "rope_theta": 1e4,
        "impl": "auto", "precision": None,
    }  # fmt: skip
    assert config.head_dim == 32


def test_config_is_frozen_and_equal_by_value() -> None:
    config = FrameGDNConfig(64, 2, impl=Impl.TORCH, precision=2)
    assert config == FrameGDNConfig(64, 2, impl="torch", precision=Precision.IEEE)
    assert hash(config) == hash(FrameGDNConfig(64, 2, impl="torch", precision="ieee"))
    assert (config.impl, config.precision) == ("torch", "ieee")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.heads = 4  # type: ignore[misc]


def test_config_replace_validates_again() -> None:
    with pytest.raises(ValueError, match=r"dim must be a multiple of heads = 3, got 64"):
        dataclasses.replace(FrameGDNConfig(64, 2), heads=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 65}, r"dim must be a multiple of heads = 2, got 65"),
        ({"dim": 0}, r"dim must be >= 1, got 0"),
        ({"heads": 0}, r"heads must be >= 1, got 0"),
        ({"dim": 6}, r"D = dim / heads must be even with rope_theta, got 3"),
        ({"conv_size": -1}, r"conv_size must be >= 0, got -1"),
        ({"conv_size": 0, "conv_qv": True}, r"conv_qv must be False with conv_size = 0, got True"),
        ({"norm_eps": -1e-5}, r"norm_eps must be a finite number >= 0"),
        ({"eps": 0.0}, r"eps must be a finite number > 0"),
        ({"rope_theta": 0.0}, r"rope_theta must be a finite number > 0"),
        ({"key_scale": "dim-spatial"}, r"key_scale must be one of 'dim_spatial', 'dim', 'none', got 'dim-spatial'"),
        ({"impl": "cuda"}, r"impl must be one of 'auto', 'torch', 'triton', got 'cuda'"),
        ({"precision": "fp32"}, r"precision must be one of 'bf16', 'tf32', 'ieee', got 'fp32'"),
        ({"precision": 3}, r"precision must be one of 'bf16', 'tf32', 'ieee' or 0, 1, 2, got 3"),
    ],
)
def test_config_refuses_a_value_and_lists_what_is_allowed(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrameGDNConfig(**{"dim": 64, "heads": 2, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 64.0}, "dim must be an int, got float"),
        ({"heads": True}, "heads must be an int, got bool"),
        ({"conv_size": None}, "conv_size must be an int, got NoneType"),
        ({"qkv_bias": 1}, "qkv_bias must be a bool, got int"),
        ({"output_gate": "yes"}, "output_gate must be a bool, got str"),
        ({"conv_qv": None}, "conv_qv must be a bool, got NoneType"),
        ({"qk_norm": 0}, "qk_norm must be a bool, got int"),
        ({"norm_eps": "1e-5"}, "norm_eps must be a number, got str"),
        ({"eps": None}, "eps must be a number, got NoneType"),
        ({"rope_theta": "1e4"}, "rope_theta must be a number, got str"),
        ({"key_scale": None}, "key_scale must be a str, got NoneType"),
        ({"impl": None}, "impl must be a str, got NoneType"),
        ({"precision": 2.0}, "precision must be a str, got float"),
        ({"key_scal": "dim"}, "key_scal"),
    ],
)
def test_config_refuses_a_wrong_type_or_field(fields: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FrameGDNConfig(**{"dim": 64, "heads": 2, **fields})


def test_odd_head_width_is_allowed_without_rotation() -> None:
    assert FrameGDNConfig(dim=6, heads=2, rope_theta=None).head_dim == 3


def test_camera_config_has_one_field_more_and_checks_all() -> None:
    config = CameraGDNConfig(64, 2, impl=Impl.TORCH, patch_size=[1, 2, 2])
    assert dataclasses.asdict(config) == {
        **dataclasses.asdict(FrameGDNConfig(64, 2, impl="torch")), "patch_size": (1, 2, 2)
    }  # fmt: skip
    assert CameraGDNConfig(64, 2).patch_size == (1, 1, 1)
    assert hash(config) != hash(CameraGDNConfig(64, 2, impl="torch"))


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"dim": 24}, ValueError, r"^D = dim / heads must be a multiple of 8 with a camera branch, got 12$"),
        ({"patch_size": (1, 0, 2)}, ValueError, r"^patch_size must be three sizes >= 1, got \(1, 0, 2\)$"),
        ({"patch_size": 2}, TypeError, r"^patch_size must be three ints \(p_t, p_h, p_w\), got 2$"),
        ({"patch_size": (1, 2.0, 2)}, TypeError, "^patch_size must be three ints"),
        ({"eps": 0.0}, ValueError, "^eps must be a finite number > 0"),
        ({"norm_eps": -1e-5}, ValueError, "^norm_eps must be a finite number >= 0"),
        ({"conv_size": -1}, ValueError, "^conv_size must be >= 0, got -1$"),
        ({"rope_theta": 0.0}, ValueError, "^rope_theta must be a finite number > 0"),
        ({"key_scale": "dim-spatial"}, ValueError, "^key_scale must be one of 'dim_spatial', 'dim', 'none', got 'dim-"),
        ({"impl": "cuda"}, ValueError, "^impl must be one of 'auto', 'torch', 'triton', got 'cuda'$"),
        ({"precision": "fp32"}, ValueError, "^precision must be one of 'bf16', 'tf32', 'ieee', got 'fp32'$"),
        ({"qk_norm": 0}, TypeError, "^qk_norm must be a bool, got int$"),
        ({"key_scal": "dim"}, TypeError, "key_scal"),
    ],
)
def test_camera_config_refuses(fields: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        CameraGDNConfig(**{"dim": 64, "heads": 2, **fields})
