"""Context parallelism for Gated Delta Networks: frames split over ranks, results equal to one device.

Importing this package needs neither CUDA nor Triton and does not initialise CUDA.
"""

from gdn_cp import simulate
from gdn_cp.__about__ import __version__
from gdn_cp.affine import AffineMap
from gdn_cp.collectives import count_exchanges
from gdn_cp.context import CPContext
from gdn_cp.frame_gdn import cp_frame_gdn, cp_frame_gdn_numerator, cp_frame_gdn_raw
from gdn_cp.halo import halo_exchange
from gdn_cp.loss import join_backward
from gdn_cp.partition import FramePartition
from gdn_cp.token_partition import TokenPartition

__all__ = [
    "AffineMap",
    "CPContext",
    "FramePartition",
    "TokenPartition",
    "__version__",
    "count_exchanges",
    "cp_frame_gdn",
    "cp_frame_gdn_numerator",
    "cp_frame_gdn_raw",
    "halo_exchange",
    "join_backward",
    "simulate",
]
