"""Blocks of frame-wise gated delta networks with a camera branch: causal, bidirectional and chunk-causal."""

from __future__ import annotations

from gdn_kernels import Direction
from gdn_models.camera_block import CameraGDNBlock

_MASK = (1 << 64) - 1


class CameraFrameGDN(CameraGDNBlock):
    """Causal block with a camera branch: `FrameGDN`, and a second recurrence in the frames of the viewing rays.

        q, k, v = q_proj_cam(x), k_proj_cam(x), v_proj_cam(x)          k = conv_k_cam(k)  (q and v too with conv_qv)
        q, k, v, inflation = camera_operands(q, k, v, rays)            RMSNorm, ReLU, key scale, ray transforms inside
        seen = camera_output(frame_gdn_numerator(q, k, v, beta / max(inflation, 1), decay), rays)
        y = proj((mixed + out_proj_cam(seen)) * SiLU(output_gate(x)))

    with beta, decay and mixed those of `FrameGDN`. Without a camera the block is `FrameGDN`. Parameters beyond those of
    `FrameGDN`, their shapes and what `reset_parameters` sets them to:

    ================================================  ===========  ====================================================
    ``{q,k,v}_proj_cam.weight``, ``.bias``            [C, C], [C]  Xavier uniform, 0
    ``out_proj_cam.weight``, ``.bias``                [C, C], [C]  0, 0: the branch starts silent
    ``q_norm_cam.weight``, ``k_norm_cam.weight``      [C]          1; absent without ``qk_norm``
    ``conv_k_cam.weight``                             [C, 1, K]    the identity; absent with ``conv_size=0``
    ``conv_q_cam.weight``, ``conv_v_cam.weight``      [C, 1, K]    the identity; only with ``conv_qv``
    ================================================  ===========  ====================================================

    The three classes have the same keys. ``init_camera_from_main`` starts the branch from the main one.

    Example:
        >>> block = CameraFrameGDN(dim=16, heads=2)
        >>> block(torch.rand(1, 12, 16), (3, 2, 2), torch.rand(1, 3, 20)).shape
        torch.Size([1, 12, 16])
    """

    direction = Direction.FORWARD


class CameraBidirectionalGDN(CameraGDNBlock):
    """Bidirectional block with a camera branch: `BidirectionalGDN` and what `CameraFrameGDN` adds, read both ways.

    Example:
        >>> from gdn_models import ray_transforms
        >>> block, camera = CameraBidirectionalGDN(dim=16, heads=2), torch.rand(1, 3, 20)
        >>> rays = ray_transforms(camera, (3, 2, 2))
        >>> x = torch.rand(1, 12, 16)
        >>> torch.equal(block(x, (3, 2, 2), rays), block(x, (3, 2, 2), camera))
        True
    """

    direction = Direction.BIDIRECTIONAL
    can_stream = False


class CameraChunkCausalGDN(CameraGDNBlock):
    """Chunk-causal block with a camera branch: `ChunkCausalGDN` and what `CameraFrameGDN` adds, in the same chunks.

    Example:
        >>> from gdn_models import chunk_schedule
        >>> block = CameraChunkCausalGDN(dim=16, heads=2)
        >>> x, camera = torch.rand(1, 28, 16), torch.rand(1, 7, 20)
        >>> block(x, (7, 2, 2), camera, chunk_starts=chunk_schedule(7, 3)).shape
        torch.Size([1, 28, 16])
    """

    direction = Direction.BIDIRECTIONAL
    has_chunks = True


def keep_camera(p: float, seed: int, step: int, layer: int) -> bool:
    """Decide whether a layer sees its camera in a training step; pass ``camera=None`` where this is False.

    A function of its arguments alone, by integer arithmetic: equal on all ranks, which must agree on whether the branch
    communicates, and equal when a checkpointed layer runs again. One decision per layer and step, for the whole batch.

    Args:
        p: probability of leaving the branch out; at most 0 always keeps it, at least 1 never does.
        seed: of the run, the same on every rank.
        step: training step.
        layer: index of the layer.

    Raises:
        TypeError: ``p`` is not a number, or another argument not an int.
        ValueError: ``p`` is NaN.

    Example:
        >>> [keep_camera(0.5, seed=1, step=step, layer=3) for step in range(4)]
        [True, True, True, False]
        >>> keep_camera(0.0, 0, 0, 0), keep_camera(1.0, 0, 0, 0)
        (True, False)
    """
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise TypeError(f"p must be a number, got {type(p).__name__}")
    if p != p:
        raise ValueError("p must not be NaN")
    state = 0
    for name, value in (("seed", seed), ("step", step), ("layer", layer)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        state = _mixed(state ^ _mixed(value & _MASK))
    return (state >> 11) * 2.0**-53 >= p


def _mixed(x: int) -> int:
    """Return 64 bits that depend on every bit of ``x``: an odd step, then two rounds of shift and multiply."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
