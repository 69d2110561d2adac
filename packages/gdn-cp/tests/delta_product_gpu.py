"""The FLA backend on a GPU: what its tests and their spawned ranks share."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import torch.distributed as dist
from delta_product_shares import PER_STEP, SCALE, Share, error
from torch import Tensor

from gdn_cp import CPContext, TokenPartition, count_exchanges
from gdn_cp.delta_product import FLAGatedDeltaProductCPBackend, fla_functions, gdp_chunkwise_context_parallel


def backend_with_few_configurations() -> FLAGatedDeltaProductCPBackend:
    """Return the backend, its kernels tuned over three or four configurations each: minutes less to compile."""
    found = FLAGatedDeltaProductCPBackend()
    for module, _ in fla_functions._FUNCTIONS:
        for held in vars(importlib.import_module(module)).values():
            kernel = tuner(held)
            if kernel is not None and len(kernel.configs) > 4:
                kernel.configs = kernel.configs[:: max(1, len(kernel.configs) // 3)]
    return found


def tuner(kernel: Any) -> Any:
    """Return the tuner of a kernel, which may be wrapped; None of anything else."""
    from triton.runtime.autotuner import Autotuner

    while kernel is not None and not isinstance(kernel, Autotuner):
        kernel = getattr(kernel, "fn", None) if type(kernel).__module__.startswith(("triton", "fla")) else None
    return kernel


def step(
    share: Share, rank: int, context: CPContext, backend: Any, dtype: torch.dtype, device: str = "cuda"
) -> dict[str, Tensor]:
    """Return a rank's part of what `Share.exact` returns: through the published function and autograd."""
    span = TokenPartition(share.counts).span(rank)
    leaves = share.leaves(dtype, device)
    for name, x in leaves.items():
        steps = share.steps if name in PER_STEP else 1
        own = x if name == "initial_state" else x[:, span.start * steps : span.stop * steps]  # strided for B > 1
        leaves[name] = own.detach().requires_grad_()
    metadata = None if share.cu is None else TokenPartition(share.counts).packed(share.cu, rank, device)
    output, final = gdp_chunkwise_context_parallel(
        leaves["q"], leaves["k"], leaves["v"], leaves.get("g"), leaves["beta"], None, share.steps, SCALE, None, backend,
        context=context, metadata=metadata, initial_state=leaves["initial_state"], output_final_state=True,
    )  # fmt: skip
    doutput, dfinal = share.weights(dtype, device)
    place = share.place(rank, device)
    arriving = torch.zeros_like(final)
    for fragment in place["end"]:
        arriving[fragment] = dfinal[place["sequences"][fragment]]
    grads = torch.autograd.grad([output, final], list(leaves.values()), [doutput[:, span.start : span.stop], arriving])
    found = {"output": output.detach(), **{f"d{name}": x for name, x in zip(leaves, grads, strict=True)}}
    found["final_state"] = torch.zeros_like(dfinal)
    for fragment in place["end"]:
        found["final_state"][place["sequences"][fragment]] = final.detach()[fragment]
    return found


def worker(share: Share, rank: int) -> tuple[dict[str, float], list[str]]:
    """Run one rank; return its errors against fp64, and its exchanges."""
    exact, span = share.exact(torch.bfloat16, "cuda"), TokenPartition(share.counts).span(rank)
    context, backend = CPContext(dist.group.WORLD), backend_with_few_configurations()
    step(share, rank, context, backend, torch.bfloat16)  # tunes and compiles
    with count_exchanges() as exchanges:
        found = step(share, rank, context, backend, torch.bfloat16)
    for name in ("final_state", "dinitial_state"):  # each sequence's on one rank, zero on the others
        dist.all_reduce(found[name])
    errors = {}
    for name, x in found.items():
        steps = share.steps if name[1:] in PER_STEP else 1
        whole = name in ("final_state", "dinitial_state")
        own = exact[name] if whole else exact[name][:, span.start * steps : span.stop * steps]
        errors[name] = error(x, own)
    return errors, list(exchanges.labels)


def bound(share: Share) -> functools.partial[tuple[dict[str, float], list[str]]]:
    """Return the worker of a share: a partial, which can be sent to a spawned process."""
    return functools.partial(worker, share)
