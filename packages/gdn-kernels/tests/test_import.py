"""The package in a fresh process: no Triton, no CUDA, and the surface that its documentation lists."""

import doctest
import os
import subprocess
import sys

import pytest
import torch

import gdn_kernels

OPERATIONS = (
    "camera_operands", "camera_output", "frame_gdn", "frame_gdn_numerator", "frame_gdn_raw", "gated_delta_product",
    "l2_normalize",
)  # fmt: skip
TABLES = ("camera_rotary_tables", "rotary_tables")


def run_fresh(program: str, **environment: str) -> str:
    """Run a program in a new interpreter, warnings being errors; return what it printed."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


PROGRAM = """
import sys
sys.modules["triton"] = None  # any import of it fails
import torch
import gdn_kernels
assert not torch.cuda.is_initialized()
qkv, beta, decay = torch.rand(1, 6, 3, 2, 4, requires_grad=True), torch.rand(1, 2, 3, 2), torch.rand(1, 2, 3)
for impl in ("auto", "torch"):
    gdn_kernels.frame_gdn(qkv, beta, decay, direction="bidirectional", impl=impl).output.sum().backward()
assert qkv.grad.isfinite().all()
try:
    gdn_kernels.frame_gdn(qkv, beta, decay, impl="triton")
except NotImplementedError as error:
    print(error)
assert not torch.cuda.is_initialized()
"""


def test_import_and_a_training_step_need_neither_triton_nor_cuda() -> None:
    """FC-I07: a named impl that cannot run raises."""
    assert 'impl="triton" needs tensors on a GPU, got cpu; use impl="torch"' in run_fresh(PROGRAM)


def test_import_brings_no_triton_of_its_own() -> None:
    program = "import torch, sys; before = set(sys.modules); import gdn_kernels; print(*(set(sys.modules) - before))"
    added = {name.split(".")[0] for name in run_fresh(program).split()}
    assert "triton" not in added


def test_public_surface_is_what_it_lists() -> None:
    classes = {"Direction", "FrameState", "Impl", "Precision", "RayTransforms", "RotaryTables"}
    results = {"CameraOperands", "DeltaProductResult", "FrameGDNNumeratorResult", "FrameGDNRawResult", "FrameGDNResult"}
    functions = {*OPERATIONS, *TABLES}
    assert set(gdn_kernels.__all__) == classes | results | functions | {"__version__"}
    for name in gdn_kernels.__all__:
        assert getattr(gdn_kernels, name) is not None


@pytest.mark.parametrize("name", [*OPERATIONS, *TABLES])
def test_examples_in_docstrings_print_what_they_say(name: str) -> None:
    names = {"torch": torch, **vars(gdn_kernels)}
    for example in doctest.DocTestFinder(recurse=False).find(getattr(gdn_kernels, name), name, globs=names):
        outcome = doctest.DocTestRunner().run(example)
        assert outcome.attempted > 0
        assert outcome.failed == 0
