"""Checkpoints and caches of the published SANA-WM line (NVlabs/Sana), in and out.

State-dict keys of the blocks are the published ones, so there is nothing to rename. Published blocks hold one entry
more, ``recall_gate``, a zero that nothing reads: dropped on the way in, written on the way out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gdn_kernels import checks
from gdn_models.block import FrameGDNBlock
from gdn_models.cache import CameraState, GDNState

_UNUSED = "recall_gate"
_MOST_NAMED = 8
# Slots of the published cache of one block; the others belong to other layers, or say which layer this is.
_KV, _Z, _CAMERA_KV, _TAIL, _SLOTS = 0, 1, 2, 4, 5


def load_published(module: nn.Module, state_dict: Mapping[str, Tensor], *, prefix: str = "") -> None:
    """Load a published checkpoint into a block, or into a model that holds blocks, strictly.

    Args:
        module: a block, or a model whose other parameters are in the checkpoint too.
        state_dict: the checkpoint; not written to.
        prefix: what the keys of this module begin with in the checkpoint; other keys are not looked at.

    Raises:
        ValueError: Keys are missing, left over, or of another shape; all of them are named. A checkpoint without norms
            of q and k is for blocks with ``qk_norm=False``.
        NotImplementedError: The checkpoint's convolutions have a bias, which the blocks do not.

    Example:
        >>> from gdn_models import FrameGDN, load_published, published_state_dict
        >>> trained, block = FrameGDN(dim=16, heads=2), FrameGDN(dim=16, heads=2)
        >>> load_published(block, published_state_dict(trained))
        >>> torch.equal(block.qkv.weight, trained.qkv.weight)
        True
    """
    given = {
        key.removeprefix(prefix): value
        for key, value in state_dict.items()
        if key.startswith(prefix) and key.rpartition(".")[2] != _UNUSED
    }
    biases = [key for key in given if key.endswith(".bias") and "conv_" in key.split(".")[-2]]
    if biases:
        raise NotImplementedError(f"convolutions with a bias are not supported, got {_some(biases)}")
    own = module.state_dict()
    faults = []
    missing, extra = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing:
        faults.append(f"missing {_some(missing)}")
    if extra:
        faults.append(f"left over {_some(extra)}")
    for key in sorted(own.keys() & given.keys()):
        if own[key].shape != given[key].shape:
            faults.append(f"{key} must have shape {list(own[key].shape)}, got {list(given[key].shape)}")
    if faults:
        raise ValueError(f"the checkpoint does not fit {type(module).__name__}: {'; '.join(faults)}")
    module.load_state_dict(given, strict=True)


def published_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a block or model as the published code loads it, strictly.

    Returns:
        dict[str, Tensor]: the entries of ``module.state_dict()``, and a ``recall_gate`` of one zero for every block.

    Example:
        >>> from gdn_models import FrameGDN, published_state_dict
        >>> published_state_dict(FrameGDN(dim=16, heads=2))["recall_gate"]
        tensor([0.])
    """
    exported = dict(module.state_dict())
    for name, block in module.named_modules():
        if isinstance(block, FrameGDNBlock):
            weight = block.qkv.weight
            exported[f"{name}.{_UNUSED}" if name else _UNUSED] = torch.zeros(
                1, dtype=weight.dtype, device=weight.device
            )
    return exported


def _some(keys: Sequence[str]) -> str:
    shown = ", ".join(keys[:_MOST_NAMED])
    return shown if len(keys) <= _MOST_NAMED else f"{shown} and {len(keys) - _MOST_NAMED} more"


def state_from_published(cache: Sequence[Tensor | None], frames: int) -> GDNState:
    """Return the state that a published cache of one block holds.

    Args:
        cache: slots of one block: 0 the main state, value-first ``[B, H, D, D]``; 1 z ``[B, H, D, 1]``; 2 the camera's
            state, key-first, or None; 4 the tail of the convolution of k, ``[B*S, K-1, C]``, or None. Others are not
            looked at.
        frames: how many frames the stream has read, which published caches do not say.

    Raises:
        ValueError: A slot is missing or of another shape.

    Example:
        >>> from gdn_models import state_from_published
        >>> cache = [torch.rand(1, 2, 4, 4), torch.rand(1, 2, 4, 1), None, None, torch.rand(6, 3, 8)]
        >>> state = state_from_published(cache, frames=4)
        >>> state.kv.equal(cache[0].mT), state.conv[1].shape
        (True, torch.Size([1, 3, 6, 8]))
    """
    if len(cache) < _SLOTS:
        raise ValueError(f"cache must have at least {_SLOTS} slots, got {len(cache)}")
    kv, z, camera_kv, tail = cache[_KV], cache[_Z], cache[_CAMERA_KV], cache[_TAIL]
    if kv is None or z is None:
        raise ValueError("cache must hold the main state in slots 0 and 1")
    checks.require_rank("slot 0", kv, "B, H, D, D")
    batch, heads, width, _ = kv.shape
    checks.require_shape("slot 0", kv, "B, H, D, D", (batch, heads, width, width))
    checks.require_shape("slot 1", z, "B, H, D, 1", (batch, heads, width, 1))
    own = None
    if tail is not None:
        checks.require_rank("slot 4", tail, "B*S, K-1, C")
        if tail.shape[0] % max(batch, 1):
            raise ValueError(f"slot 4 must have a multiple of B = {batch} rows, got {tail.shape[0]}")
        own = tail.reshape(batch, -1, *tail.shape[1:]).transpose(1, 2).contiguous()
    camera = None
    if camera_kv is not None:
        checks.require_shape("slot 2", camera_kv, "B, H, D, D", (batch, heads, width, width))
        camera = CameraState(camera_kv, (None, None, None))
    return GDNState(kv.mT.contiguous(), z.squeeze(-1), (None, own, None), camera, frames)


def state_to_published(state: GDNState) -> list[Tensor | None]:
    """Return the published cache of one block that holds the state; the inverse of `state_from_published`.

    Raises:
        NotImplementedError: The state has tails that published caches have no slot for: of q, of v, of the camera.

    Example:
        >>> from gdn_models import FrameGDN, state_to_published
        >>> [slot if slot is None else list(slot.shape) for slot in
        ...  state_to_published(FrameGDN(dim=16, heads=2).init_state(1, (0, 2, 2)))]
        [[1, 2, 8, 8], [1, 2, 8, 1], None, None, [4, 3, 16]]
    """
    q, k, v = state.conv
    camera = None if state.camera is None else state.camera.kv
    homeless = [q, v, *(() if state.camera is None else state.camera.conv)]
    if any(tail is not None for tail in homeless):
        raise NotImplementedError("published caches hold the tail of the main convolution of k alone")
    tail = None if k is None else k.transpose(1, 2).flatten(0, 1)
    return [state.kv.mT.contiguous(), state.z[..., None], camera, None, tail]
