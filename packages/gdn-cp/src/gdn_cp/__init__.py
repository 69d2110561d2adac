"""Context parallelism for Gated Delta Networks: frames split over ranks, results equal to one device.

Importing this package needs neither CUDA nor Triton and does not initialise CUDA.
"""

from gdn_cp import chunkwise, cost_model, delta_product, simulate
from gdn_cp.__about__ import __version__
from gdn_cp.adapters import (
    CpFusedTransitionBundle,
    cp_scan_states_to_phase_c_states,
    phase_a_to_cp_scan_transitions,
)
from gdn_cp.affine import AffineMap
from gdn_cp.checkpoint import keep_exchanges
from gdn_cp.collectives import count_exchanges
from gdn_cp.context import CPContext
from gdn_cp.frame_gdn import cp_frame_gdn, cp_frame_gdn_numerator, cp_frame_gdn_raw
from gdn_cp.frame_scan import CpFrameGdnScanResult, cp_frame_gdn_scan
from gdn_cp.fused import (
    CpFusedGdnRawResult,
    cp_fused_cam_gdn_num_autograd,
    cp_fused_gdn_chunkwise_raw_autograd,
)
from gdn_cp.halo import cp_halo_exchange, halo_exchange
from gdn_cp.loss import join_backward
from gdn_cp.partition import FramePartition
from gdn_cp.token_partition import TokenPartition

__all__ = [
    "AffineMap",
    "CPContext",
    "CpFrameGdnScanResult",
    "CpFusedGdnRawResult",
    "CpFusedTransitionBundle",
    "FramePartition",
    "TokenPartition",
    "__version__",
    "chunkwise",
    "delta_product",
    "cost_model",
    "count_exchanges",
    "cp_frame_gdn",
    "cp_frame_gdn_numerator",
    "cp_frame_gdn_raw",
    "cp_frame_gdn_scan",
    "cp_fused_cam_gdn_num_autograd",
    "cp_fused_gdn_chunkwise_raw_autograd",
    "cp_halo_exchange",
    "cp_scan_states_to_phase_c_states",
    "halo_exchange",
    "join_backward",
    "keep_exchanges",
    "phase_a_to_cp_scan_transitions",
    "simulate",
]
