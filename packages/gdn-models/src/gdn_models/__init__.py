"""Blocks of frame-wise Gated Delta Networks for video models, on one device or on the ranks of a context.

Importing this package needs neither CUDA nor Triton and does not initialise CUDA.
"""

from gdn_models.__about__ import __version__
from gdn_models.cache import CameraState, DeltaProductState, GDNState
from gdn_models.camera import CameraBidirectionalGDN, CameraChunkCausalGDN, CameraFrameGDN, keep_camera
from gdn_models.checkpoint import load_published, published_state_dict, state_from_published, state_to_published
from gdn_models.chunks import chunk_schedule
from gdn_models.config import CameraGDNConfig, FrameGDNConfig, GatedDeltaProductConfig
from gdn_models.delta_product import GatedDeltaProduct
from gdn_models.frame_gdn import BidirectionalGDN, ChunkCausalGDN, FrameGDN
from gdn_models.parallel import all_reduce_gradients, apply_context_parallel, reduce_loss
from gdn_models.presets import Preset, preset
from gdn_models.ucpe import ray_transforms

__all__ = [
    "BidirectionalGDN",
    "CameraBidirectionalGDN",
    "CameraChunkCausalGDN",
    "CameraFrameGDN",
    "CameraGDNConfig",
    "CameraState",
    "ChunkCausalGDN",
    "DeltaProductState",
    "FrameGDN",
    "FrameGDNConfig",
    "GDNState",
    "GatedDeltaProduct",
    "GatedDeltaProductConfig",
    "Preset",
    "__version__",
    "all_reduce_gradients",
    "apply_context_parallel",
    "chunk_schedule",
    "keep_camera",
    "load_published",
    "preset",
    "published_state_dict",
    "ray_transforms",
    "reduce_loss",
    "state_from_published",
    "state_to_published",
]
