"""Kernels of frame-wise Gated Delta Networks, and the plain torch reference they are held to.

Importing this package needs neither CUDA nor Triton and does not initialise CUDA.
"""

from gdn_kernels.__about__ import __version__
from gdn_kernels.frame_gdn.op import frame_gdn, frame_gdn_numerator, frame_gdn_raw
from gdn_kernels.rope import RotaryTables, rotary_tables
from gdn_kernels.types import (
    Direction,
    FrameGDNNumeratorResult,
    FrameGDNRawResult,
    FrameGDNResult,
    FrameState,
    Impl,
    Precision,
)

__all__ = [
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
    "rotary_tables",
]
