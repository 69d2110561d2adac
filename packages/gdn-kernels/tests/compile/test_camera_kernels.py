"""The kernels of the camera branch, compiled without a GPU: stores, registers, spills, wide loads."""

from __future__ import annotations

import functools

import pytest
import torch
from requirements import require_compiler

require_compiler()
from kernel_compiler import LIMITS_KB, TARGETS, Call, Compiled, Launch, compile_launch, recording  # noqa: E402

from gdn_kernels.camera import blocks, output, prepare, prepare_bwd  # noqa: E402

STACK_BUDGET = 256  # bytes per thread
KERNELS = {"prepare_kernel", "prepare_bwd_kernel", "output_kernel"}
CASES = [
    ("sm_90", 112, torch.bfloat16), ("sm_90", 8, torch.float16), ("sm_90", 256, torch.float32),
    ("sm_80", 112, torch.bfloat16), ("sm_100", 72, torch.bfloat16), ("sm_120", 128, torch.float32),
    ("gfx942", 112, torch.bfloat16),
]  # fmt: skip


@functools.lru_cache(maxsize=len(CASES))
def compiled(target: str, width: int, dtype: torch.dtype) -> dict[str, Compiled]:
    """Return what the kernels become with every flag on."""
    launches: list[Launch] = []
    x = torch.zeros(1, 6, 2, width, dtype=dtype)
    weight, rays, table = torch.ones(2, width, dtype=dtype), torch.zeros(1, 6, 4, 4), torch.zeros(6, width // 4)
    call = prepare.CameraCall(weight, weight, rays, rays, table, table, 2, 0.3, 1e-5)
    with recording(launches.append, (prepare, prepare_bwd, output)):
        rho = torch.zeros(1, 6)
        prepare.prepare(x, x, x, call)
        prepare_bwd.prepare_bwd(x, x, rho, rho, (x, x, x, torch.zeros(1, 2, 2)), call)
        output.transform_output(x, rays, table, table, dtype)
    precision = "bf16" if dtype.itemsize == 2 else "ieee"
    return {launch.kernel.__name__: compile_launch(launch, Call(target, width, precision)) for launch in launches}


@pytest.mark.parametrize("target, width, dtype", CASES, ids=str)
def test_kernels_compile_store_and_do_not_spill(target: str, width: int, dtype: torch.dtype) -> None:
    found = compiled(target, width, dtype)
    assert target in TARGETS
    assert found.keys() == KERNELS
    for name, kernel in found.items():
        print(f"{target} {width} {dtype} {name}: {kernel.registers} registers, {kernel.stack} of stack")
        assert kernel.stores, name
        assert not kernel.traps, name
        assert kernel.shared <= LIMITS_KB[target] * 1024, name
        assert kernel.stack is None or kernel.stack <= STACK_BUDGET, name


def test_every_width_has_a_block_of_powers_of_two() -> None:
    for kernel in blocks.KERNELS:
        for width in range(8, 257, 8):
            block = blocks.camera_block(kernel, width)
            for size in (*block[:3], blocks.padded_half(width)):
                assert size > 0
                assert size & (size - 1) == 0
            assert width // 2 <= blocks.padded_half(width) < width or width == 8
