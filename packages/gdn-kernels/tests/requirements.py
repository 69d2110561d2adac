"""What a folder of tests needs of its process: each function skips the calling module, with the reason, or returns."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch


def require_interpreter() -> None:
    """Kernels run on the CPU only in a process that asked for the interpreter before it imported Triton."""
    _require_triton()
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)


def require_compiler() -> None:
    """Kernels compile for a target that is not there only in a process without the interpreter."""
    _require_triton()
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("needs a process without TRITON_INTERPRET", allow_module_level=True)


def require_gpu() -> None:
    """Kernels run on a CUDA device, compiled."""
    require_compiler()
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device", allow_module_level=True)


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs the package triton", allow_module_level=True)
