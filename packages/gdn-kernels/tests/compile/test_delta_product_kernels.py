"""The kernel of the gated delta product, compiled without a GPU: shared memory, spills, matrix instructions."""

from __future__ import annotations

import functools

import pytest
import torch
from requirements import require_compiler

require_compiler()
from kernel_compiler import LIMITS_KB, TARGETS, Call, Compiled, Launch, compile_launch, recording  # noqa: E402

from gdn_kernels.delta_product import chunk_grads as module  # noqa: E402

STACK_BUDGET = 1024  # bytes per thread
# the width that FLA's kernel gets wrong, a narrow one, the usual one, the widest
CASES = [
    ("sm_90", 64, torch.bfloat16), ("sm_90", 128, torch.bfloat16), ("sm_90", 256, torch.bfloat16),
    ("sm_80", 128, torch.bfloat16), ("sm_100", 128, torch.bfloat16), ("sm_120", 128, torch.bfloat16),
    ("gfx942", 64, torch.bfloat16), ("sm_90", 16, torch.float32),
]  # fmt: skip


@functools.lru_cache(maxsize=len(CASES))
def compiled(target: str, width: int, dtype: torch.dtype) -> tuple[Compiled, int]:
    """Return what the kernel becomes with every flag on, and the bound that its launch went by."""
    launches: list[Launch] = []
    rows, limit = 80, LIMITS_KB[target] * 1024
    shared_memory, module.shared_memory = module.shared_memory, lambda device: limit
    try:
        with recording(launches.append, (module,)):
            q, v = torch.zeros(1, rows, 2, width, dtype=dtype), torch.zeros(1, rows, 2, width, dtype=dtype)
            states, g = torch.zeros(2, 2, width, width, dtype=dtype), torch.zeros(1, rows, 2)
            cu, chunks = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([[0, 0], [0, 1]], dtype=torch.int32)
            module.chunk_grads(
                q, q, v, v, states, states, g, v, scale=0.1, cu_seqlens=cu, chunk_indices=chunks
            )  # fmt: skip
    finally:
        module.shared_memory = shared_memory
    (launch,) = launches
    shape = module.chunk_shape(width, width, 64, dtype.itemsize, limit)
    estimate = module.shared_estimate(shape, 64, dtype.itemsize)
    return compile_launch(launch, Call(target, width, "bf16" if dtype.itemsize == 2 else "ieee")), estimate


@pytest.mark.parametrize("target, width, dtype", CASES, ids=str)
def test_kernel_compiles_fits_and_does_not_spill(target: str, width: int, dtype: torch.dtype) -> None:
    kernel, estimate = compiled(target, width, dtype)
    print(f"{target} {width} {dtype}: {kernel.registers} registers, {kernel.stack} of stack, {kernel.shared} shared")
    assert target in TARGETS
    assert kernel.stores
    assert not kernel.traps
    assert kernel.shared <= estimate <= LIMITS_KB[target] * 1024
    assert kernel.stack is None or kernel.stack <= STACK_BUDGET
    assert kernel.matrix_products or dtype == torch.float32


@pytest.mark.parametrize("limit_kb", [48, 64, 99, 163, 227])
def test_every_device_gets_blocks_that_fit(limit_kb: int) -> None:
    for width in (16, 24, 64, 100, 128, 256):
        shape = module.chunk_shape(width, width, 64, 2, limit_kb * 1024)
        assert module.shared_estimate(shape, 64, 2) <= limit_kb * 1024
    with pytest.raises(NotImplementedError, match=r"needs \d+ bytes of shared memory, the device offers 1024"):
        module.chunk_shape(64, 64, 64, 2, 1024)
