"""What the FLA backend calls, found by attribute, and the tables of packed sequences that it passes."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import itertools
import types
from typing import Any

import torch
from torch import Tensor

CHUNK = 64
WIDEST_KEY = 256

_FUNCTIONS = (
    ("fla.utils", "input_guard"),
    ("fla.ops.utils.cumsum", "chunk_local_cumsum"),
    ("fla.ops.utils.solve_tril", "solve_tril"),
    ("fla.ops.common.chunk_scaled_dot_kkt", "chunk_scaled_dot_kkt_fwd"),
    ("fla.ops.common.chunk_delta_h", "chunk_gated_delta_rule_fwd_h"),
    ("fla.ops.common.chunk_delta_h", "chunk_gated_delta_rule_bwd_dhu"),
    ("fla.ops.common.chunk_o", "chunk_fwd_o"),
    ("fla.ops.common.chunk_o", "chunk_bwd_dv_local"),
    ("fla.ops.gated_delta_rule.wy_fast", "recompute_w_u_fwd"),
    ("fla.ops.gated_delta_rule.wy_fast", "prepare_wy_repr_bwd"),
    ("fla.ops.gated_delta_product.chunk_deltaproduct_h", "chunk_gated_delta_product_fwd_h"),
    ("fla.ops.gated_delta_product.chunk_deltaproduct_o", "chunk_gated_delta_product_fwd_o"),
    ("fla.ops.cp.chunk_fwd", "chunk_cp_fwd_h"),
    ("fla.ops.cp.chunk_bwd", "chunk_cp_bwd_dh"),
    ("fla.ops.cp.chunk_merge", "chunk_cp_merge"),
    ("gdn_kernels.delta_product.chunk_grads", "chunk_grads"),
)


@functools.cache
def load() -> types.SimpleNamespace:
    """Import what the backend calls, by attribute."""
    found: dict[str, Any] = {}
    for module, name in _FUNCTIONS:
        try:
            found[name] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            try:
                installed = f"fla-core {importlib.metadata.version('fla-core')} is installed"
            except importlib.metadata.PackageNotFoundError:
                installed = "fla-core is not installed"
            raise ImportError(
                f"the FLA backend needs {module}.{name}, {installed}; install gdn-cp[fla] or use the torch backend"
            ) from error
    return types.SimpleNamespace(**found)


def _expand_cu_seqlens(cu_seqlens: Tensor, num_householder: int) -> Tensor:
    """Return ``cu_seqlens`` in rows: the same object for one step per token."""
    return cu_seqlens if num_householder == 1 else cu_seqlens * num_householder


@functools.lru_cache(maxsize=64)
def chunk_tables(bounds: tuple[int, ...], num_householder: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return ``cu_seqlens`` and its chunks, in tokens and in rows: ``(cu, cu_dp, chunks, chunks_dp)``, int32.

    Kept by value: FLA keeps tables by the identity of a tensor, which a caller may have changed in place.
    """

    def upload(values: list[Any], width: int) -> Tensor:
        made = torch.tensor(values, dtype=torch.int32).view(-1, width)
        if device.type == "cuda" and values:
            made = made.pin_memory()
        return made.to(device, non_blocking=True)

    def chunks(steps: int) -> list[tuple[int, int]]:
        lengths = [(stop - start) * steps for start, stop in itertools.pairwise(bounds)]
        return [(row, i) for row, length in enumerate(lengths) for i in range(-(-length // CHUNK))]

    with torch.inference_mode(False):  # a table made while sampling may be saved for a backward later
        cu = upload(list(bounds), 1).view(-1)
        return (
            cu, _expand_cu_seqlens(cu, num_householder), upload(chunks(1), 2), upload(chunks(num_householder), 2)
        )  # fmt: skip
