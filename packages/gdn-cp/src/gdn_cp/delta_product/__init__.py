"""Gated delta product over ranks: the published entry point in `common`, backends in modules of their own."""

from gdn_cp.delta_product.choice import BACKENDS, choose_backend
from gdn_cp.delta_product.common import (
    GDPChunkwiseContextParallel,
    GDPChunkwiseCPBackend,
    GDPInputGradients,
    GDPInputs,
    gdp_chunkwise_context_parallel,
)
from gdn_cp.delta_product.fla import FLAGatedDeltaProductCPBackend
from gdn_cp.delta_product.torch import TorchGatedDeltaProductCPBackend

__all__ = [
    "BACKENDS",
    "FLAGatedDeltaProductCPBackend",
    "GDPChunkwiseCPBackend",
    "GDPChunkwiseContextParallel",
    "GDPInputGradients",
    "GDPInputs",
    "TorchGatedDeltaProductCPBackend",
    "choose_backend",
    "gdp_chunkwise_context_parallel",
]
