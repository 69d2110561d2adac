"""Random calls of the three operations: drawing tensors, running an operation or its oracle, gradients by name.

A *case* maps names to leaf tensors: ``qkv``, ``beta``, ``decay``, ``q_norm_weight``, ``k_norm_weight``, the initial
state ``kv`` and ``z``, and the rotary tables ``cos`` and ``sin``, which need no gradient. A name that is absent is an
argument that is not given. An operation is called by its *kind*: ``output``, ``raw`` or ``numerator``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sequential_frame_gdn import sequential_frame_gdn
from torch import Tensor

from gdn_kernels import FrameState, RotaryTables, frame_gdn, frame_gdn_numerator, frame_gdn_raw

Case = dict[str, Tensor]
Results = dict[str, Tensor]

KINDS = ("output", "raw", "numerator")
DIRECTIONS = ("forward", "reverse", "bidirectional")
B, H, F, S, D = 2, 3, 5, 7, 4  # pairwise different, so that swapped axes cannot pass
K_SCALE = 0.4  # about twice (D S) ** -0.5: writes matter, nothing explodes
EPS = 1e-6
STARTS = (0, 1, 3)  # chunks of one, two and two frames
MASK = torch.tensor([[True, False, True, False, True], [True, True, True, True, False]])  # frames 1, 3 start chunks
NO_GRADIENT = ("cos", "sin")


def draw(
    sizes: tuple[int, int, int, int, int] = (B, H, F, S, D),
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    without: tuple[str, ...] = (),
) -> Case:
    """Return a random case of ``sizes = (B, H, F, S, D)``; states are not symmetric; odd widths get no rotation."""
    batch, heads, frames, spatial, width = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    angle = 6.0 * uniform(frames * spatial, width // 2)
    sign = torch.where(torch.arange(heads * width) % 5 == 3, -1.0, 1.0)  # a weight may have learned to be negative
    case = {
        "qkv": normal(batch, frames * spatial, 3, heads, width),
        "beta": 0.1 + uniform(batch, heads, frames, spatial),
        "decay": 0.3 + 0.7 * uniform(batch, heads, frames),
        "q_norm_weight": (0.5 + uniform(heads * width)) * sign,
        "k_norm_weight": (0.5 + uniform(heads * width)) * sign,
        "kv": normal(batch, heads, width, width),
        "z": 0.5 + uniform(batch, heads, width),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }
    if width % 2:
        del case["cos"], case["sin"]
    case = {name: value.to(dtype) for name, value in case.items() if name not in without}
    return leaves(case)


def leaves(case: Mapping[str, Tensor]) -> Case:
    """Return fresh leaves of the same values, asking for a gradient where one is defined."""
    return {name: value.detach().clone().requires_grad_(name not in NO_GRADIENT) for name, value in case.items()}


def cast(case: Mapping[str, Tensor], dtype: torch.dtype, *names: str) -> Case:
    """Return fresh leaves, the named ones in ``dtype``."""
    return leaves({name: value.to(dtype) if name in names else value for name, value in case.items()})


def run(kind: str, case: Mapping[str, Tensor], direction: str = "forward", **options: Any) -> Results:
    """Call the operation; return its results by name, the final state included where there is one."""
    has_state = direction != "reverse"
    options = {"direction": direction, "output_final_state": has_state, **options}
    if kind == "numerator":
        q, k, v = case["qkv"].unbind(2)
        state = case.get("kv") if has_state else None
        result = frame_gdn_numerator(q, k, v, case["beta"], case["decay"], initial_state=state, **options)
        return named({"numerator": result.numerator, "final_kv": result.final_state})
    if "k_scale" not in options:
        options["k_scale"] = K_SCALE
    if "cos" in case:
        options["rope"] = RotaryTables(case["cos"], case["sin"])
    if "kv" in case and has_state:
        options["initial_state"] = FrameState(case["kv"], case["z"])
    for name in ("q_norm_weight", "k_norm_weight"):
        options[name] = case.get(name)
    if kind == "output":
        output, final = frame_gdn(case["qkv"], case["beta"], case["decay"], **options)
        found = {"output": output}
    else:
        numerator, denominator, final = frame_gdn_raw(case["qkv"], case["beta"], case["decay"], **options)
        found = {"numerator": numerator, "denominator": denominator}
    return named({**found, "final_kv": final and final.kv, "final_z": final and final.z})


def run_sequential(
    kind: str,
    case: Mapping[str, Tensor],
    direction: str = "forward",
    *,
    chunk_starts: tuple[int, ...] | None = None,
    frame_valid: Tensor | None = None,
    k_scale: float = K_SCALE,
    norm_eps: float = 1e-5,
    eps: float = EPS,
) -> Results:
    """Return what `run` must return, from the sequential loop."""
    heads, width = case["qkv"].shape[-2:]
    weights = {name: case[name].view(heads, width) for name in ("q_norm_weight", "k_norm_weight") if name in case}
    features = kind != "numerator"
    kv, z = case.get("kv"), case.get("z")
    state = None if kv is None else (kv, torch.zeros_like(kv[..., 0]) if z is None else z)
    result = sequential_frame_gdn(
        *case["qkv"].unbind(2), case["beta"], case["decay"], direction=direction, features=features,
        cos=case.get("cos") if features else None, sin=case.get("sin") if features else None, **weights,
        norm_eps=norm_eps if weights else None, k_scale=k_scale,
        chunk_starts=tuple(start for start in chunk_starts or () if start), frame_valid=frame_valid, forward=state,
    )  # fmt: skip
    final = {"final_kv": result.forward_kv, "final_z": result.forward_z} if direction != "reverse" else {}
    if kind == "numerator":
        final.pop("final_z", None)
        return {"numerator": result.numerator, **final}
    if kind == "raw":
        return {"numerator": result.numerator, "denominator": result.denominator, **final}
    denominator = result.denominator.mT[..., None] + eps
    return {"output": result.numerator / denominator, **final}


def named(results: Mapping[str, Tensor | None]) -> Results:
    """Drop what is None."""
    return {name: value for name, value in results.items() if value is not None}


def upstream(results: Mapping[str, Tensor], seed: int = 7) -> Results:
    """Return a random incoming gradient for each result."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        for name, value in results.items()
    }


def gradients(
    results: Mapping[str, Tensor], incoming: Mapping[str, Tensor], case: Mapping[str, Tensor], keep: bool = False
) -> dict[str, Tensor | None]:
    """Return the gradient of every leaf, None where no path reaches it; results without ``incoming`` get none."""
    wanted = {name: value for name, value in case.items() if value.requires_grad}
    used = [name for name in results if name in incoming]
    found = torch.autograd.grad(
        [results[name] for name in used], list(wanted.values()), [incoming[name] for name in used],
        allow_unused=True, retain_graph=keep,
    )  # fmt: skip
    return dict(zip(wanted, found, strict=True))
