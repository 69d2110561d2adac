"""Every launch shape that FLA's tuner may choose, alone: what its kernels give against their equations in fp64.

Triton has compiled some of them wrongly on Hopper, to finite values; a tuner that goes by time picks those too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import fla_in_torch
import pytest
import torch
from delta_product_gpu import tuner
from delta_product_shares import error
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if importlib.util.find_spec("fla") is None:
    pytest.skip("needs the package fla-core", allow_module_level=True)

from gdn_cp.delta_product import fla_functions  # noqa: E402

TOKENS, STEPS, HEADS, SCALE = 200, 2, 2, 0.25  # heads of keys
# operands are exact; products take operands that were rounded to 2 ** -9 once or twice more, results are rounded once
TOLERANCE = 6e-3
KERNELS = {
    "chunk_scaled_dot_kkt_fwd": "chunk_scaled_dot_kkt_fwd_kernel",
    "solve_tril": "merge_16x16_to_64x64_inverse_kernel",
    "recompute_w_u_fwd": "recompute_w_u_fwd_kernel",
    "chunk_gated_delta_rule_fwd_h": "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_gated_delta_product_fwd_h": "chunk_gated_delta_product_fwd_kernel_h_blockdim64",
    "chunk_gated_delta_product_fwd_o": "chunk_fwd_kernel_o",
    "chunk_fwd_o": "chunk_fwd_kernel_o",
    "chunk_bwd_dv_local": "chunk_bwd_kernel_dv_local",
    "chunk_gated_delta_rule_bwd_dhu": "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
    "prepare_wy_repr_bwd": "prepare_wy_repr_bwd_kernel",
    "chunk_cp_fwd_h": "chunk_cp_fwd_kernel_h",
    "chunk_cp_bwd_dh": "chunk_cp_bwd_kernel_dh",
    "chunk_cp_merge": "chunk_cp_fwd_bwd_kernel_merge",
}
WRITTEN = {"chunk_cp_fwd_h": "hm", "chunk_cp_bwd_dh": "dhm", "chunk_cp_merge": "h"}  # results that are handed in
UNGROUPED = ("chunk_gated_delta_product_fwd_h", "chunk_gated_delta_product_fwd_o")  # as many value heads as key heads
CHAINED = ("chunk_gated_delta_rule_fwd_h", "chunk_gated_delta_rule_bwd_dhu", "prepare_wy_repr_bwd")


@functools.cache
def operands(width: int, gated: bool, group: int) -> dict[str, dict[str, Any]]:
    """Return what each function is called with in a training step, by the equations, on the CPU."""
    ops, rows, values = fla_in_torch.functions(), TOKENS * STEPS, group * HEADS
    generator = torch.Generator().manual_seed(width + gated)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    none: dict[str, Any] = {"cu_seqlens": None, "chunk_indices": None}
    k = torch.nn.functional.normalize(normal(1, rows, HEADS, width), dim=-1).bfloat16()
    last = (torch.arange(rows) % STEPS == STEPS - 1)[:, None, None]
    q, do = (normal(1, rows, HEADS, width) * last).bfloat16(), (normal(1, rows, values, width) * last).bfloat16()
    v, beta = normal(1, rows, values, width).bfloat16(), normal(1, rows, values).sigmoid().bfloat16()
    state, dstate = normal(2, 1, values, width, width)
    g = g_tokens = None
    if gated:
        decays = -0.1 * normal(1, TOKENS, values).abs()
        first = torch.zeros(1, TOKENS, STEPS, values)
        first[:, :, 0] = decays
        g_tokens = ops.chunk_local_cumsum(g=decays, chunk_size=64, scale=1.4426950216)
        g = ops.chunk_local_cumsum(g=first.view(1, rows, values), chunk_size=64, scale=1.4426950216)
    called: dict[str, dict[str, Any]] = {}

    def call(name: str, **named: Any) -> Any:
        called[name] = named
        return getattr(ops, name)(**named)

    lower = call("chunk_scaled_dot_kkt_fwd", k=k, g=g, beta=beta, chunk_size=64, output_dtype=torch.float32, **none)
    a = call("solve_tril", A=lower, output_dtype=torch.bfloat16, **none)
    w, u = call("recompute_w_u_fwd", k=k, v=v, beta=beta, A=a, g=g, **none)
    run = {"k": k, "w": w, "u": u, "g": g, "initial_state": state, "output_final_state": True, "chunk_size": 64, **none}
    h, new, _ = call("chunk_gated_delta_rule_fwd_h", **run)
    read = {"k": k, "v": new, "scale": SCALE, "chunk_size": 64, **none}
    if group == 1:
        h_tokens, _, _ = call("chunk_gated_delta_product_fwd_h", **run, num_householder=STEPS)
        q_tokens = q[:, STEPS - 1 :: STEPS].contiguous()
        call("chunk_gated_delta_product_fwd_o", q=q_tokens, h=h_tokens, g=g_tokens, num_householder=STEPS, **read)
    call("chunk_fwd_o", q=q, h=h, g=g, **read)
    back = {"q": q, "k": k, "do": do, "g": g, "scale": SCALE, "chunk_size": 64}
    dv = call("chunk_bwd_dv_local", **back, **none)
    dh, _, dnew = call("chunk_gated_delta_rule_bwd_dhu", **back, **none, w=w, dv=dv, h0=state, dht=dstate)
    dw = ops.chunk_grads(q, k, new, do, h, dh, g, dnew, scale=SCALE, chunk_size=64, **none)[2]
    call("prepare_wy_repr_bwd", k=k, v=v, beta=beta, A=a, dw=dw, du=dnew, g=g, **none)
    summaries = torch.zeros(3, values, width, 2 * width)
    bounds = torch.tensor([0, rows], dtype=torch.int32)
    call(
        "chunk_cp_fwd_h", k=k, w=w, u=u, hm=summaries[0], g=g, cu_seqlens=bounds, chunk_size=64, multi_seqs=False
    )  # fmt: skip
    call("chunk_cp_bwd_dh", **back, w=w, dv=dv, dhm=summaries[1], cu_seqlens=bounds)
    summaries[2] = summaries[0].flip(0)
    call(
        "chunk_cp_merge",
        h=torch.zeros(values, width, width),
        ag_hm=summaries.clone(),
        num_ranks=3,
        rank=3,
        forward=True,
    )
    return called


def run(ops: Any, name: str, named: dict[str, Any], device: str) -> list[Tensor]:
    """Call a function with operands on a device, its output poisoned if it is handed one; return its results."""
    moved = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in named.items()}
    written = WRITTEN.get(name)
    if written:
        moved[written] = torch.full_like(moved[written], float("nan"))
    found = getattr(ops, name)(**moved)
    if written:
        return [moved[written]]
    return [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]


def cases() -> Iterator[Any]:
    for name in KERNELS:
        shapes = [(64, True, 1), (128, True, 1)]
        shapes += [(64, False, 1), (256, True, 1)] if name in CHAINED else []
        shapes += [(64, True, 2)] if name not in UNGROUPED else []
        for width, gated, group in shapes:
            yield pytest.param(name, width, gated, group, id=f"{name}-{width}{'' if gated else '-ungated'}-{group}")


@pytest.mark.parametrize("name, width, gated, group", list(cases()))
def test_every_configuration_alone(
    name: str, width: int, gated: bool, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import OutOfResources

    ops, named = fla_functions.load(), operands(width, gated, group)[name]
    expected = run(fla_in_torch.functions(), name, named, "cpu")
    module = next(module for module, function in fla_functions._FUNCTIONS if function == name)
    kernel = tuner(vars(importlib.import_module(module))[KERNELS[name]])
    assert kernel is not None
    wrong, tried, candidates = {}, 0, list(kernel.configs)
    for configuration in candidates:
        monkeypatch.setattr(kernel, "configs", [configuration])
        kernel.cache.clear()
        try:
            found = run(ops, name, named, "cuda")
        except OutOfResources:  # which the tuner passes over
            continue
        tried += 1
        errors = [error(x, y.to("cuda")) for x, y in zip(found, expected, strict=True)]
        if not max(errors) <= TOLERANCE:
            wrong[str(configuration)] = errors
    kernel.cache.clear()
    assert tried
    assert not wrong, f"{len(wrong)} of {tried}: {wrong}"
