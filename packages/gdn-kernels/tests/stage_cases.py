"""Checked inputs, options and entry states of the stages, drawn at random; naming what tuples hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from frame_gdn_cases import K_SCALE, B, D, F, H, S, draw
from torch import Tensor

from gdn_kernels.types import Direction, FrameBoundary, FrameInputs, FrameOptions, Impl, Precision


def stage_inputs(
    kind: str,
    sizes: tuple[int, int, int, int, int] = (B, H, F, S, D),
    *,
    mask: Tensor | None = None,
    without: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> FrameInputs:
    """Return inputs whose floating tensors are leaves."""
    case = draw(sizes, dtype=dtype, seed=seed)
    if kind == "numerator":
        operands = ((0.4 * x).detach().clone().requires_grad_() for x in case["qkv"].unbind(2))
        return FrameInputs(None, *operands, case["beta"], case["decay"], None, None, None, None, mask)
    weights = [
        None if name in without else case[name].detach().reshape(sizes[1], sizes[4]).requires_grad_()
        for name in ("q_norm_weight", "k_norm_weight")
    ]
    tables = case.get("cos"), case.get("sin")
    return FrameInputs(case["qkv"], None, None, None, case["beta"], case["decay"], *weights, *tables, mask)


def stage_options(
    kind: str, direction: str, *, resets: tuple[int, ...] = (), eps: float = 1e-6, norm_eps: float = 1e-5
) -> FrameOptions:
    """Return the options of one of the three operations."""
    features = kind != "numerator"
    return FrameOptions(
        features, features, kind == "output", Direction(direction), resets if direction != "forward" else (),
        K_SCALE if features else 1.0, norm_eps, eps, Precision.IEEE, Impl.TORCH,
    )  # fmt: skip


def entry_of(inputs: FrameInputs, options: FrameOptions, seed: int = 3) -> FrameBoundary:
    """Return random entry states for whatever takes part."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads = inputs.beta.shape[:2]
    width = inputs.operands()[0].shape[-1]

    def state(part: bool, *tail: int) -> Tensor | None:
        if not part:
            return None
        value = torch.randn(batch, heads, *tail, generator=generator, dtype=torch.float64)
        return (value if len(tail) == 2 else 0.5 + value.abs()).to(inputs.state_dtype).requires_grad_()

    past, future = options.direction.reads_past, options.direction.reads_future
    return FrameBoundary(
        state(past, width, width), state(past and options.has_z, width),
        state(future, width, width), state(future and options.has_z, width),
    )  # fmt: skip


def named_tensors(*groups: Mapping[str, Tensor | None] | tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    """Return the tensors of mappings and named tuples by name, without the Nones."""
    found: dict[str, Tensor] = {}
    for group in groups:
        items = group.items() if isinstance(group, Mapping) else zip(group._fields, group, strict=True)
        found.update({name: value for name, value in items if value is not None})
    return found


def cut(inputs: FrameInputs, options: FrameOptions, start: int, stop: int) -> tuple[FrameInputs, FrameOptions]:
    """Return the call that a device would get which owns frames ``start ... stop - 1`` only."""
    spatial = inputs.beta.shape[3]
    tokens, frames = slice(start * spatial, stop * spatial), slice(start, stop)

    def part(x: Tensor | None, *index: slice) -> Tensor | None:
        return None if x is None else x[index]

    every = slice(None)
    local = FrameInputs(
        *(part(x, every, tokens) for x in inputs[:4]),
        inputs.beta[:, :, frames], inputs.decay[:, :, frames], inputs.q_norm_weight, inputs.k_norm_weight,
        part(inputs.rope_cos, tokens), part(inputs.rope_sin, tokens), part(inputs.frame_valid, every, frames),
    )  # fmt: skip
    resets = tuple(f - start for f in options.resets if start <= f < stop)
    return local, dataclasses.replace(options, resets=resets)
