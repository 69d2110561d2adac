"""Kernels of frame-wise and token-wise Gated Delta Networks, and the plain torch reference they are held to.

Importing this package needs neither CUDA nor Triton and does not initialise CUDA.
"""

from gdn_kernels.__about__ import __version__
from gdn_kernels.camera.op import camera_operands, camera_output
from gdn_kernels.delta_product.l2_norm import l2_normalize
from gdn_kernels.delta_product.op import gated_delta_product
from gdn_kernels.frame_gdn.op import frame_gdn, frame_gdn_numerator, frame_gdn_raw
from gdn_kernels.rope import RotaryTables, camera_rotary_tables, rotary_tables
from gdn_kernels.types import (
    CameraOperands,
    DeltaProductResult,
    Direction,
    FrameGDNNumeratorResult,
    FrameGDNRawResult,
    FrameGDNResult,
    FrameState,
    Impl,
    Precision,
    RayTransforms,
)

__all__ = [
    "CameraOperands",
    "DeltaProductResult",
    "Direction",
    "FrameGDNNumeratorResult",
    "FrameGDNRawResult",
    "FrameGDNResult",
    "FrameState",
    "Impl",
    "Precision",
    "RayTransforms",
    "RotaryTables",
    "__version__",
    "camera_operands",
    "camera_output",
    "camera_rotary_tables",
    "frame_gdn",
    "frame_gdn_numerator",
    "frame_gdn_raw",
    "gated_delta_product",
    "l2_normalize",
    "rotary_tables",
]
