"""State of a stream: what a block hands from one call to the next, as a value that is passed in and returned."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_kernels import checks
from gdn_models.config import require_count
from gdn_models.gates import Grid

ConvTails = tuple[Tensor | None, Tensor | None, Tensor | None]


class CameraState(NamedTuple):
    """The camera branch's part of a `GDNState`: ``kv [B, H, D, D]`` key-first fp32, and its own convolutions' tails.

    Example:
        >>> CameraState(torch.zeros(1, 2, 4, 4), (None, None, None)).kv.shape
        torch.Size([1, 2, 4, 4])
    """

    kv: Tensor
    conv: ConvTails


class GDNState(NamedTuple):
    """What a block remembers of the frames it has read. A tuple: nothing writes into it, copies are cheap to keep.

    Made by ``block.init_state``, returned by ``block(x, grid, state=...)``. Gradients flow through it; truncated
    back-propagation is ``state.detach()``. `torch.save` and `torch.load` take it, where this package is imported.

    Attributes:
        kv: ``[B, H, D, D]`` key-first, fp32 (fp64 for fp64 blocks).
        z: ``[B, H, D]`` in the dtype of kv.
        conv: last K - 1 inputs of the convolutions of q, k and v, ``[B, K-1, S, C]`` each, None without one.
        camera: state of the camera branch; None in blocks without one.
        frames: how many frames were read: the position of the next one.
        spatial: h and w of the grid, fixed over a stream; None where they are not known yet, as in a converted cache.

    Example:
        >>> from gdn_models import FrameGDN
        >>> block, x = FrameGDN(dim=16, heads=2), torch.rand(1, 12, 16)
        >>> state = block.init_state(1, (0, 2, 2))
        >>> first, state = block(x[:, :8], (2, 2, 2), state=state)
        >>> second, state = block(x[:, 8:], (1, 2, 2), state=state)
        >>> state.frames, torch.allclose(torch.cat([first, second], 1), block(x, (3, 2, 2)), atol=1e-5)
        (3, True)
    """

    kv: Tensor
    z: Tensor
    conv: ConvTails
    camera: CameraState | None
    frames: int
    spatial: tuple[int, int] | None = None

    def detach(self) -> GDNState:
        """Return the state cut from the graph that made it."""
        camera = self.camera and CameraState(self.camera.kv.detach(), _detached(self.camera.conv))
        return self._replace(kv=self.kv.detach(), z=self.z.detach(), conv=_detached(self.conv), camera=camera)


class DeltaProductState(NamedTuple):
    """What `GatedDeltaProduct` remembers of the tokens it has read.

    ``recurrent [B, HV, K, V]`` key-first, fp32 (fp64 for fp64 layers); ``conv``: the last inputs of the convolutions of
    q, k and v, ``[B, taps - 1, channels]`` each, None without one; any floating dtype is taken, and cast.

    Example:
        >>> from gdn_models import GatedDeltaProduct
        >>> layer, x = GatedDeltaProduct(dim=16, heads=2, head_dim=8), torch.rand(1, 5, 16)
        >>> state = layer.init_state(1)
        >>> first, state = layer(x[:, :3], state=state)
        >>> second, state = layer(x[:, 3:], state=state)
        >>> torch.allclose(torch.cat([first, second], 1), layer(x), atol=1e-5)
        True
    """

    recurrent: Tensor
    conv: ConvTails

    def detach(self) -> DeltaProductState:
        """Return the state cut from the graph that made it."""
        return DeltaProductState(self.recurrent.detach(), _detached(self.conv))


torch.serialization.add_safe_globals([GDNState, CameraState, DeltaProductState])  # for torch.load(weights_only=True)


def _detached(tails: ConvTails) -> ConvTails:
    q, k, v = (None if tail is None else tail.detach() for tail in tails)
    return q, k, v


def check_state_request(batch: object, dtype: object) -> None:
    """Raise unless a state for ``batch`` samples with tails of ``dtype`` can be made."""
    require_count("batch", batch, 0)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, got {type(dtype).__name__}")
    if dtype not in checks.FLOATING:
        names = ", ".join(str(allowed).removeprefix("torch.") for allowed in checks.FLOATING)
        raise ValueError(f"dtype must be one of {names}, got {str(dtype).removeprefix('torch.')}")


def zero_tails(shape: tuple[int, int, int, int], used: tuple[bool, bool, bool], **factory: Any) -> ConvTails:
    """Return tails of the given shape ``[B, K-1, S, C]`` for the convolutions in use: nothing came before."""
    q, k, v = (torch.zeros(shape, **factory) if here else None for here in used)
    return q, k, v


def next_tail(extended: Tensor, reach: int) -> Tensor:
    """Return the last ``reach`` frames of a convolution's input ``[B, F, S, C]``, in memory of their own."""
    return extended[:, extended.shape[1] - reach :].clone()


def check_tails(
    name: str, tails: object, used: tuple[bool, bool, bool], shape: tuple[int, int, int, int], like: Tensor
) -> None:
    """Raise ValueError unless there is a tail of this shape for every convolution in use, and no other."""
    if not isinstance(tails, tuple) or len(tails) != 3:
        raise TypeError(f"{name} must be a tuple of three tails, got {type(tails).__name__}")
    for letter, tail, here in zip("qkv", tails, used, strict=True):
        label = f"{name} of {letter}"
        if (tail is not None) != here:
            raise ValueError(f"{label} must be {'a tensor' if here else 'None'} for this block")
        if tail is not None:
            checks.require_tensor(label, tail)
            checks.require_shape(label, tail, "B, K-1, S, C", shape)
            checks.require_dtype(label, tail, checks.FLOATING)
            checks.require_device(label, tail, like.device, "x")


def check_state(
    state: object, grid: Grid, batch: int, heads: int, width: int, dtype: torch.dtype, like: Tensor
) -> GDNState:
    """Return the state if it is one of this block and grid; ValueError or TypeError if not. Its tails are not read."""
    if not isinstance(state, GDNState):
        raise TypeError(f"state must be a GDNState or None, got {type(state).__name__}")
    square, column = ("B, H, D, D", (batch, heads, width, width)), ("B, H, D", (batch, heads, width))
    for label, value, (letters, shape) in (("state.kv", state.kv, square), ("state.z", state.z, column)):
        if value is None:
            raise ValueError(f"{label} must be a tensor: kv and z go together")
        checks.require_tensor(label, value)
        checks.require_shape(label, value, letters, shape)
        checks.require_dtype(label, value, (dtype,))
        checks.require_device(label, value, like.device, "x")
    if isinstance(state.frames, bool) or not isinstance(state.frames, int):
        raise TypeError(f"state.frames must be an int, got {type(state.frames).__name__}")
    if state.frames < 0:
        raise ValueError(f"state.frames must be >= 0, got {state.frames}")
    if state.spatial is not None:
        if not isinstance(state.spatial, tuple) or len(state.spatial) != 2:
            raise TypeError(f"state.spatial must be a tuple (h, w) or None, got {state.spatial!r}")
        if state.spatial != grid[1:]:
            raise ValueError(
                f"grid must have the h and w of the stream, {tuple(state.spatial)}, in every call, got {grid[1:]}"
            )
    return state
