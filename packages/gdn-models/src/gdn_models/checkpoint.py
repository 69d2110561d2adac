"""Checkpoints and caches of the published SANA-WM line (NVlabs/Sana), in and out.

State-dict keys of the blocks are the published ones, so there is nothing to rename. Published blocks hold one entry
more, ``recall_gate``, a zero that nothing reads: dropped on the way in, written on the way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gdn_kernels import checks
from gdn_models.block import FrameGDNBlock
from gdn_models.cache import CameraState, GDNState
from gdn_models.config import require_count
from gdn_models.gates import wide_dtype

_UNUSED = "recall_gate"
# Wrappers of activation checkpointing and FSDP: in the names of modules, not in those of state dicts.
_WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")
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
            of q and k is for blocks with ``qk_norm=False``. The module or the checkpoint is on the meta device, where
            nothing can be copied. Nothing is loaded then.
        TypeError: A value of the checkpoint is not a tensor where the module has one.
        NotImplementedError: The convolutions of a block have a bias in the checkpoint, which ours do not.

    Example:
        >>> from gdn_models import FrameGDN, load_published, published_state_dict
        >>> trained, block = FrameGDN(dim=16, heads=2), FrameGDN(dim=16, heads=2)
        >>> load_published(block, published_state_dict(trained))
        >>> torch.equal(block.qkv.weight, trained.qkv.weight)
        True
    """
    own, blocks = module.state_dict(), {name for name, _ in _blocks(module)}
    given = {
        key.removeprefix(prefix): value
        for key, value in state_dict.items()
        if key.startswith(prefix) and (key.removeprefix(prefix) in own or key.rpartition(".")[2] != _UNUSED)
    }
    biases = sorted(key for key in given if key not in own and _is_convolution_bias(key, blocks))
    if biases:
        raise NotImplementedError(f"convolutions with a bias are not supported, got {', '.join(biases)}")
    faults = []
    missing, extra = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing:
        faults.append(f"missing {', '.join(missing)}")
    if extra:
        faults.append(f"left over {', '.join(extra)}")
    tensors = [key for key in sorted(own.keys() & given.keys()) if isinstance(own[key], Tensor)]
    for key in tensors:
        checks.require_tensor(key, given[key])
        if own[key].shape != given[key].shape:
            faults.append(f"{key} must have shape {list(own[key].shape)}, got {list(given[key].shape)}")
    if faults:
        raise ValueError(f"the checkpoint does not fit {type(module).__name__}: {'; '.join(faults)}")
    for owner, values, advice in (
        (type(module).__name__, own, "call module.to_empty(device=...) first"),
        ("the checkpoint", given, "load it on a device that holds data"),
    ):
        empty = [key for key in tensors if values[key].is_meta]
        if empty:
            raise ValueError(f"{owner} must not be on the meta device, got {', '.join(empty)} there; {advice}")
    module.load_state_dict(given, strict=True)


def published_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a block or model as the published code loads it, strictly.

    Returns:
        dict[str, Tensor]: the entries of ``module.state_dict()``, and a ``recall_gate`` of one zero under every name of
        every block. Wrappers of activation checkpointing are in no name.

    Example:
        >>> from gdn_models import FrameGDN, published_state_dict
        >>> published_state_dict(FrameGDN(dim=16, heads=2))["recall_gate"]
        tensor([0.])
    """
    exported = dict(module.state_dict())
    for name, block in _blocks(module):
        weight = block.qkv.weight
        exported[f"{name}.{_UNUSED}" if name else _UNUSED] = torch.zeros(1, dtype=weight.dtype, device=weight.device)
    return exported


def _blocks(module: nn.Module) -> Iterator[tuple[str, FrameGDNBlock]]:
    """Yield every block under all the names that it has in a state dict."""
    for name, block in module.named_modules(remove_duplicate=False):
        if isinstance(block, FrameGDNBlock):
            yield ".".join(part for part in name.split(".") if part not in _WRAPPERS), block


def _is_convolution_bias(key: str, blocks: set[str]) -> bool:
    layer, _, parameter = key.rpartition(".")
    block, _, own_name = layer.rpartition(".")
    return parameter == "bias" and own_name.startswith("conv_") and block in blocks


def state_from_published(cache: Sequence[Tensor | None], frames: int) -> GDNState:
    """Return the state that a published cache of one block holds.

    Args:
        cache: slots of one block: 0 the main state, value-first ``[B, H, D, D]``; 1 z ``[B, H, D, 1]``; 2 the camera's
            state, key-first, or None; 4 the tail of the convolution of k, ``[B*S, K-1, C]``, or None. Others are not
            looked at.
        frames: how many frames the stream has read, which published caches do not say.

    Returns:
        GDNState: in memory of its own, the matrices in fp32 (fp64 if slot 0 is); slots in 16 bits are widened.

    Raises:
        ValueError: A slot is missing or of another shape, dtype or device; slot 4 for B = 0, where it does not say how
            many tokens a frame has; ``frames`` is negative.
        TypeError: A slot is not a tensor, or ``frames`` not an int.

    Example:
        >>> from gdn_models import state_from_published
        >>> cache = [torch.rand(1, 2, 4, 4), torch.rand(1, 2, 4, 1), None, None, torch.rand(6, 3, 8)]
        >>> state = state_from_published(cache, frames=4)
        >>> state.kv.equal(cache[0].mT), state.conv[1].shape
        (True, torch.Size([1, 3, 6, 8]))
    """
    require_count("frames", frames, 0)
    if len(cache) < _SLOTS:
        raise ValueError(f"cache must have at least {_SLOTS} slots, got {len(cache)}")
    kv, z, camera_kv, tail = cache[_KV], cache[_Z], cache[_CAMERA_KV], cache[_TAIL]
    if kv is None or z is None:
        raise ValueError("cache must hold the main state in slots 0 and 1")
    checks.require_rank("slot 0", kv, "B, H, D, D")
    batch, heads, width, _ = kv.shape
    square = (batch, heads, width, width)
    wide = wide_dtype(kv)
    for slot, value, letters, shape in (
        (_KV, kv, "B, H, D, D", square),
        (_Z, z, "B, H, D, 1", (batch, heads, width, 1)),
        (_CAMERA_KV, camera_kv, "B, H, D, D", square),
    ):
        if value is not None:
            checks.require_shape(f"slot {slot}", value, letters, shape)
            checks.require_dtype(f"slot {slot}", value, [x for x in checks.FLOATING if x.itemsize <= wide.itemsize])
            checks.require_device(f"slot {slot}", value, kv.device, "slot 0")
    own = None
    if tail is not None:
        checks.require_rank("slot 4", tail, "B*S, K-1, C")
        checks.require_shape("slot 4", tail, "B*S, K-1, C = H*D", (*tail.shape[:2], heads * width))
        checks.require_dtype("slot 4", tail, checks.FLOATING)
        checks.require_device("slot 4", tail, kv.device, "slot 0")
        if not batch:
            raise ValueError("slot 4 must be None for B = 0: it does not say how many tokens a frame has")
        if tail.shape[0] % batch:
            raise ValueError(f"slot 4 must have a multiple of B = {batch} rows, got {tail.shape[0]}")
        own = _copied(tail.reshape(batch, tail.shape[0] // batch, *tail.shape[1:]).transpose(1, 2))
    camera = None if camera_kv is None else CameraState(_copied(camera_kv.to(wide)), (None, None, None))
    return GDNState(_copied(kv.mT.to(wide)), _copied(z.squeeze(-1).to(wide)), (None, own, None), camera, frames)


def state_to_published(state: GDNState) -> list[Tensor | None]:
    """Return the published cache of one block that holds the state; the inverse of `state_from_published`.

    Returns:
        list[Tensor | None]: five slots, in memory of their own.

    Raises:
        TypeError: ``state`` is not a `GDNState`.
        NotImplementedError: The state has tails that published caches have no slot for: of q, of v, of the camera.

    Example:
        >>> from gdn_models import FrameGDN, state_to_published
        >>> [slot if slot is None else list(slot.shape) for slot in
        ...  state_to_published(FrameGDN(dim=16, heads=2).init_state(1, (0, 2, 2)))]
        [[1, 2, 8, 8], [1, 2, 8, 1], None, None, [4, 3, 16]]
    """
    if not isinstance(state, GDNState):
        raise TypeError(f"state must be a GDNState, got {type(state).__name__}")
    q, k, v = state.conv
    camera = None if state.camera is None else _copied(state.camera.kv)
    homeless = [q, v, *(() if state.camera is None else state.camera.conv)]
    if any(tail is not None for tail in homeless):
        raise NotImplementedError("published caches hold the tail of the main convolution of k alone")
    tail = None if k is None else _copied(k.transpose(1, 2)).flatten(0, 1)
    return [_copied(state.kv.mT), _copied(state.z[..., None]), camera, None, tail]


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
