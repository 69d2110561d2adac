"""Which backend runs a gated delta product: the one that is named, or the fastest that can."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gdn_cp.delta_product.fla import DTYPES, FLAGatedDeltaProductCPBackend
from gdn_cp.delta_product.fla_functions import WIDEST_KEY
from gdn_cp.delta_product.torch import TorchGatedDeltaProductCPBackend
from gdn_kernels.delta_product import op

BACKENDS = ("auto", "torch", "fla")
Backend = FLAGatedDeltaProductCPBackend | TorchGatedDeltaProductCPBackend


def choose_backend(name: str, q: Tensor) -> Backend:
    """Return a backend by name.

    Args:
        name: ``"torch"``, ``"fla"``, or ``"auto"``: FLA's kernels for bf16 and fp16 on a CUDA device, if all that the
            backend calls can be imported, else torch. A backend that is named is the one that is returned; inputs that
            it does not take, it refuses when it runs.
        q: the queries, ``[B, T, H, K]``, K up to 256. Ranks must agree: their dtype and K are the same, the packages
            must be.

    Returns:
        Backend: the backend, which holds no state.

    Raises:
        TypeError: ``name`` is no str.
        ValueError: No backend has this name, or K > 256, which none takes.
        ImportError: ``"fla"``, and FLA or a function of it is missing.

    Example:
        >>> import torch
        >>> type(choose_backend("auto", torch.rand(1, 4, 2, 8))).__name__
        'TorchGatedDeltaProductCPBackend'
    """
    if not isinstance(name, str):
        raise TypeError(f"backend must be a str, got {type(name).__name__}")
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
    if q.shape[-1] > op.WIDEST_KEY:
        raise ValueError(f"q must have K <= {op.WIDEST_KEY} for any backend, got K = {q.shape[-1]}; use narrower heads")
    if name == "torch" or (name == "auto" and not (q.is_cuda and q.dtype in DTYPES and q.shape[-1] <= WIDEST_KEY)):
        return TorchGatedDeltaProductCPBackend()
    if torch.compiler.is_compiling():  # imports are nothing to trace, and what follows runs outside the graph anyway
        outside: Backend = torch.compiler.disable(choose_backend)(name, q)  # type: ignore[no-untyped-call]
        return outside
    return FLAGatedDeltaProductCPBackend() if name == "fla" else _fastest()


@functools.cache
def _fastest() -> Backend:
    try:
        return FLAGatedDeltaProductCPBackend()
    except ImportError:
        return TorchGatedDeltaProductCPBackend()
