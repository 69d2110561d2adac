"""Kernels of frame-wise and token-wise Gated Delta Networks, and the plain torch reference they are held to.

Importing this package needs neither CUDA nor Triton and does not initialise CUDA.
"""

from gdn_kernels.__about__ import __version__
from gdn_kernels.delta_product.l2_norm import l2_normalize
from gdn_kernels.delta_product.op import gated_delta_product
from gdn_kernels.frame_gdn.op import frame_gdn, frame_gdn_numerator, frame_gdn_raw
from gdn_kernels.rope import RotaryTables, rotary_tables
from gdn_kernels.types import (
    DeltaProductResult,
    Direction,
    FrameGDNNumeratorResult,
    FrameGDNRawResult,
    FrameGDNResult,
    FrameState,
    Impl,
    Precision,
)

__all__ = [
    "DeltaProductResult",
    "Direction",
    "FrameGDNNumeratorResult",
    "FrameGDNRawResult",
    "FrameGDNResult",
    "FrameState",
    "Impl",
    "Precision",
    "RotaryTables",
    "__version__",
    "frame_gdn",
    "frame_gdn_numerator",
    "frame_gdn_raw",
    "gated_delta_product",
    "l2_normalize",
    "rotary_tables",
]
