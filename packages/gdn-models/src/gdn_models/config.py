"""Configuration of the modules: frozen dataclasses that validate themselves."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch

from gdn_cp.delta_product import BACKENDS
from gdn_kernels import Impl, Precision, checks
from gdn_kernels.delta_product.op import WIDEST_KEY

_Config = TypeVar("_Config")
KEY_SCALES = ("dim_spatial", "dim", "none")


@dataclasses.dataclass(frozen=True)
class FrameGDNConfig:
    """What `FrameGDN`, `BidirectionalGDN` and `ChunkCausalGDN` are made from.

    The three classes share one configuration and one set of state-dict keys, so weights move between them.

    Attributes:
        dim: C, width of the block, a multiple of ``heads``.
        heads: H; D = dim / heads, even unless ``rope_theta`` is None.
        qkv_bias: the projection to q, k and v has a bias.
        output_gate: the output is multiplied by SiLU of a projection of the block's input.
        conv_size: taps of the short convolution over frames; 0 leaves it out.
        conv_qv: q and v are convolved too, not k alone; needs ``conv_size > 0``.
        qk_norm: q and k are divided by their root mean square over all C channels and weighted.
        norm_eps: added to that mean square, >= 0.
        eps: added to the denominator of the read-out, > 0.
        key_scale: factor of k: ``"dim_spatial"`` (D*S) ** -0.5, ``"dim"`` D ** -0.5, ``"none"`` 1. The last two make
            the recurrence expand at usual sizes unless the norm weight of k is learnt small.
        rope_theta: base of the rotary frequencies, > 0; None rotates nothing.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``.
        precision: least precision of products: ``"bf16"``, ``"tf32"``, ``"ieee"`` (or 0, 1, 2), None by the dtype.

    Options are stored under their full names: ``impl=Impl.AUTO`` is kept as ``"auto"``, ``precision=2`` as ``"ieee"``.

    Raises:
        ValueError: A value is not allowed; the message lists what is.
        TypeError: A value is of the wrong Python type, or a field does not exist.

    Example:
        >>> FrameGDNConfig(dim=64, heads=2).head_dim
        32
    """

    dim: int
    heads: int
    qkv_bias: bool = False
    output_gate: bool = True
    conv_size: int = 4
    conv_qv: bool = False
    qk_norm: bool = True
    norm_eps: float = 1e-5
    eps: float = 1e-8
    key_scale: str = "dim_spatial"
    rope_theta: float | None = 1e4
    impl: Impl | str = "auto"
    precision: Precision | str | int | None = None

    def __post_init__(self) -> None:
        """Check every field, and store options under their full names."""
        for name, least in (("dim", 1), ("heads", 1), ("conv_size", 0)):
            require_count(name, getattr(self, name), least)
        for name in ("qkv_bias", "output_gate", "conv_qv", "qk_norm"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads = {self.heads}, got {self.dim}")
        if self.rope_theta is not None:
            checks.require_positive("rope_theta", self.rope_theta)
            if self.head_dim % 2:
                raise ValueError(f"D = dim / heads must be even with rope_theta, got {self.head_dim}")
        if self.conv_qv and not self.conv_size:
            raise ValueError("conv_qv must be False with conv_size = 0, got True")
        checks.require_non_negative("norm_eps", self.norm_eps)
        checks.require_positive("eps", self.eps)
        require_option("key_scale", self.key_scale, KEY_SCALES)
        self._store("impl", checks.as_impl(self.impl).value)
        if self.precision is not None:
            self._store("precision", checks.as_precision(self.precision, torch.float32).value)

    @property
    def head_dim(self) -> int:
        """D, the width of one head."""
        return self.dim // self.heads

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True)
class CameraGDNConfig(FrameGDNConfig):
    """What `CameraFrameGDN`, `CameraBidirectionalGDN` and `CameraChunkCausalGDN` are made from.

    All fields of `FrameGDNConfig`, which hold for both branches, and one more. D = dim / heads must be a multiple of 8.

    Attributes:
        patch_size: (p_t, p_h, p_w), pixels of a token in the image that the intrinsics of a camera are for.

    Raises:
        ValueError: A value is not allowed; the message lists what is.
        TypeError: A value is of the wrong Python type, or a field does not exist.

    Example:
        >>> CameraGDNConfig(dim=64, heads=2).patch_size
        (1, 1, 1)
    """

    patch_size: tuple[int, int, int] = (1, 1, 1)

    def __post_init__(self) -> None:
        """Check every field, and store options under their full names."""
        super().__post_init__()
        if self.head_dim % 8:
            raise ValueError(f"D = dim / heads must be a multiple of 8 with a camera branch, got {self.head_dim}")
        self._store("patch_size", check_patch_size(self.patch_size))


@dataclasses.dataclass(frozen=True)
class GatedDeltaProductConfig:
    """What `GatedDeltaProduct` is made from; defaults are those of the layer of flash-linear-attention.

    Attributes:
        dim: C, width of the layer.
        heads: H, heads of q and k.
        value_heads: HV, heads of v, a multiple of ``heads``; None is ``heads``.
        head_dim: K, width of a key, up to 256.
        expand_v: V / K.
        num_householder: R, steps of the state per token.
        conv_size: taps of the short convolutions over tokens; 0 leaves them out.
        forget_gate: the state decays.
        output_gate: the output is multiplied by SiLU of a projection of the layer's input.
        allow_neg_eigval: write strengths lie in (0, 2), not (0, 1).
        norm_eps: added to the mean square in the norm of the output, >= 0.
        backend: ``"torch"``; ``"fla"``, kernels of flash-linear-attention for 16 bits on a CUDA device, which need
            ``pip install "gdn-models[fla]"``; or ``"auto"``, see `gdn_cp.delta_product.choose_backend`.

    Raises:
        ValueError: A value is not allowed; the message lists what is.
        TypeError: A value is of the wrong Python type, or a field does not exist.

    Example:
        >>> GatedDeltaProductConfig(dim=64, heads=2, head_dim=16).value_dim
        32
    """

    dim: int
    heads: int
    value_heads: int | None = None
    head_dim: int = 256
    expand_v: float = 2.0
    num_householder: int = 2
    conv_size: int = 4
    forget_gate: bool = True
    output_gate: bool = True
    allow_neg_eigval: bool = True
    norm_eps: float = 1e-5
    backend: str = "auto"

    def __post_init__(self) -> None:
        """Check every field, and store options under their full names."""
        for name, least in (("dim", 1), ("heads", 1), ("head_dim", 1), ("num_householder", 1), ("conv_size", 0)):
            require_count(name, getattr(self, name), least)
        if self.head_dim > WIDEST_KEY:
            raise ValueError(f"head_dim must be <= {WIDEST_KEY} for any backend, got {self.head_dim}; use more heads")
        for name in ("forget_gate", "output_gate", "allow_neg_eigval"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {type(getattr(self, name)).__name__}")
        if self.value_heads is not None:
            require_count("value_heads", self.value_heads, 1)
            if self.value_heads % self.heads:
                raise ValueError(f"value_heads must be a multiple of heads = {self.heads}, got {self.value_heads}")
        checks.require_positive("expand_v", self.expand_v)
        if self.head_dim * self.expand_v != self.value_dim:
            raise ValueError(f"expand_v must make head_dim * expand_v an integer, got {self.head_dim * self.expand_v}")
        checks.require_non_negative("norm_eps", self.norm_eps)
        require_option("backend", self.backend, BACKENDS)

    @property
    def heads_of_values(self) -> int:
        """HV, heads of v."""
        return self.heads if self.value_heads is None else self.value_heads

    @property
    def value_dim(self) -> int:
        """V, width of a value."""
        return int(self.head_dim * self.expand_v)

    def differences(self) -> str:
        """Return sizes, and options that differ from their defaults, as arguments of a call."""
        fields = dataclasses.fields(self)
        shown = {f.name: getattr(self, f.name) for f in fields if f.default != getattr(self, f.name)}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def config_of(kind: type[_Config], given: _Config | None, options: dict[str, Any], owner: str) -> _Config:
    """Return the configuration of a module that takes one, or the fields of one; TypeError for both or neither."""
    if given is not None and (options or not isinstance(given, kind)):
        found = f"both, with {', '.join(options)}" if options else type(given).__name__
        raise TypeError(f"{owner} takes a {kind.__name__} or the fields of one, got {found}")
    return kind(**options) if given is None else given


def require_count(name: str, value: object, least: int) -> None:
    """Raise TypeError unless ``value`` is an int, ValueError unless it is at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


def require_option(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise TypeError unless ``value`` is a str, ValueError that lists ``allowed`` unless it is one of them."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {type(value).__name__}")
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(repr(x) for x in allowed)}, got {value!r}")


def check_patch_size(value: object) -> tuple[int, int, int]:
    """Return ``value`` as a tuple; TypeError unless it is three ints, ValueError unless all are at least 1."""
    if (
        not isinstance(value, tuple | list)
        or len(value) != 3
        or any(isinstance(size, bool) or not isinstance(size, int) for size in value)
    ):
        raise TypeError(f"patch_size must be three ints (p_t, p_h, p_w), got {value!r}")
    if min(value) < 1:
        raise ValueError(f"patch_size must be three sizes >= 1, got {tuple(value)}")
    return value[0], value[1], value[2]
