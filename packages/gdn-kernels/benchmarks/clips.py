"""Random clips on a device, the operation on them, and its errors against torch in fp64 on the same values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from shapes import Shape
from torch import Tensor

from gdn_kernels import FrameState, RotaryTables, frame_gdn, rotary_tables

GRADIENTS = ("dqkv", "dbeta", "ddecay", "dq_norm_weight", "dk_norm_weight")


class Clip(NamedTuple):
    """Arguments of `frame_gdn` with every feature on; the first five are leaves. A state makes it a streaming step."""

    qkv: Tensor
    beta: Tensor
    decay: Tensor
    q_norm_weight: Tensor
    k_norm_weight: Tensor
    rope: RotaryTables
    k_scale: float
    state: FrameState | None = None

    def leaves(self) -> tuple[Tensor, ...]:
        """Return what gets a gradient, in the order of `GRADIENTS`."""
        return self[:5]


def draw_clip(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0, *, has_state: bool = False) -> Clip:
    """Return a clip with gates as models in training have them: writes mostly strong, decay near one."""
    batch, frames, spatial, heads, width, _ = shape
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    rows = next(h for h in (22, 23, 20, 15, 2, 1) if spatial % h == 0)
    leaves = (
        normal(batch, frames * spatial, 3, heads, width).to(dtype),
        torch.sigmoid(normal(batch, heads, frames, spatial) + 2),
        torch.sigmoid(normal(batch, heads, frames) + 3),
        1 + 0.2 * normal(heads * width),
        1 + 0.2 * normal(heads * width),
    )
    rope = rotary_tables((frames, rows, spatial // rows), width, device=torch.device(device))
    state = FrameState(normal(batch, heads, width, width), 1 + normal(batch, heads, width).abs()) if has_state else None
    return Clip(*(x.requires_grad_() for x in leaves), rope, (width * spatial) ** -0.5, state)


def draw_gradient(clip: Clip, seed: int = 1) -> Tensor:
    """Return a random gradient of the output."""
    batch, tokens, _, heads, width = clip.qkv.shape
    generator = torch.Generator(device=clip.qkv.device).manual_seed(seed)
    gradient = torch.randn(batch, tokens, heads, width, device=clip.qkv.device, generator=generator)
    return gradient.to(clip.qkv.dtype)


def mix(clip: Clip, impl: str, direction: str = "bidirectional", **options: Any) -> Tensor:
    """Return the output of `frame_gdn`."""
    return frame_gdn(
        clip.qkv, clip.beta, clip.decay, rope=clip.rope, q_norm_weight=clip.q_norm_weight,
        k_norm_weight=clip.k_norm_weight, k_scale=clip.k_scale, direction=direction, impl=impl,
        initial_state=clip.state, output_final_state=clip.state is not None, **options,
    ).output  # fmt: skip


def in_fp64(clip: Clip) -> Clip:
    """Return fresh leaves of the same values in fp64."""
    state = None if clip.state is None else FrameState(*(x.double() for x in clip.state))
    return Clip(*(x.detach().double().requires_grad_() for x in clip.leaves()), clip.rope, clip.k_scale, state)


def output_and_gradients(
    clip: Clip, doutput: Tensor | None, impl: str, direction: str = "bidirectional", **options: Any
) -> dict[str, Tensor]:
    """Return the output and, given its gradient, the gradient of every leaf, by name."""
    if doutput is None:
        with torch.no_grad():
            return {"output": mix(clip, impl, direction, **options)}
    output = mix(clip, impl, direction, **options)
    gradients = torch.autograd.grad(output, clip.leaves(), doutput)
    return {"output": output.detach(), **dict(zip(GRADIENTS, gradients, strict=True))}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the relative Frobenius error; 0 if both are zero, inf if anything is not finite."""
    difference = float(torch.linalg.vector_norm(found.double() - exact))
    if difference == 0:
        return 0.0
    error = difference / max(float(torch.linalg.vector_norm(exact)), torch.finfo(torch.float64).tiny)
    return error if error < float("inf") else float("inf")


def errors(
    clip: Clip, doutput: Tensor | None, impl: str, direction: str = "bidirectional", **options: Any
) -> dict[str, float]:
    """Return the relative error of the output, and of every gradient if ``doutput`` is given, against torch in fp64."""
    upstream = None if doutput is None else doutput.double()
    exact = output_and_gradients(in_fp64(clip), upstream, "torch", direction)
    found = output_and_gradients(clip, doutput, impl, direction, **options)
    return {name: relative_error(found[name], value) for name, value in exact.items()}
