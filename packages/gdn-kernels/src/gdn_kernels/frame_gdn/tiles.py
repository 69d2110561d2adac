"""Launch shapes: one table, and one function that picks from it what fits the device.

A row is a shape of one kernel for a width class and an operand size; rows are tried in order and the first whose shared
memory fits is taken. Shared memory is estimated by an upper bound of what the compiler allocates.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from gdn_kernels.types import Precision

SUPPORTED_WIDTH = 256
_UNKNOWN_DEVICE_BYTES = 48 * 1024


class LaunchShape(NamedTuple):
    """The shape of one launch.

    ``block_s`` tokens, ``block_d`` channels (``num_blocks`` of them cover D), ``block_v`` columns of a scan, warps,
    pipeline stages, registers per thread (0: no limit).
    """

    block_s: int
    block_d: int
    num_blocks: int
    block_v: int
    num_warps: int
    num_stages: int
    registers: int

    def options(self) -> dict[str, int]:
        """Return the compiler options of a launch."""
        limit = {"maxnreg": self.registers} if self.registers and torch.version.hip is None else {}
        return {"num_warps": self.num_warps, **limit}


class Candidate(NamedTuple):
    """One row of the table, before the width is known; ``widest``: channels that one block covers at most."""

    block_s: int
    block_v: int
    num_warps: int
    num_stages: int
    registers: int = 0
    widest: int = 128


KERNELS = (
    "phase_a", "phase_a_z", "phase_b", "phase_c", "phase_c_query_bwd", "phase_c_state_bwd", "phase_b_bwd",
    "operators_bwd", "phase_a_bwd", "summary", "adjoint_summary",
)  # fmt: skip

# kernel -> operand bytes -> candidates, best first. Swept for correctness one by one against fp64 before timing.
TABLE: dict[str, dict[int, tuple[Candidate, ...]]] = {
    "phase_a": {
        2: (Candidate(64, 0, 8, 3), Candidate(32, 0, 8, 2), Candidate(16, 0, 4, 1, widest=64)),
        4: (Candidate(32, 0, 8, 2), Candidate(16, 0, 8, 1), Candidate(16, 0, 4, 1, widest=64)),
    },
    "phase_a_z": {
        2: (Candidate(64, 0, 4, 2), Candidate(32, 0, 8, 2), Candidate(16, 0, 4, 1, widest=64)),
        4: (Candidate(32, 0, 8, 2), Candidate(16, 0, 8, 1), Candidate(16, 0, 4, 1, widest=64)),
    },
    "phase_b": {
        2: (Candidate(0, 32, 8, 2), Candidate(0, 16, 4, 1)),
        4: (Candidate(0, 32, 8, 2), Candidate(0, 16, 4, 1), Candidate(0, 16, 4, 1, widest=64)),
    },
    "phase_c": {
        2: (Candidate(64, 0, 4, 1), Candidate(32, 0, 4, 1), Candidate(16, 0, 4, 1, widest=64)),
        4: (Candidate(32, 0, 8, 1), Candidate(16, 0, 4, 1), Candidate(16, 0, 4, 1, widest=64)),
    },
    "phase_c_query_bwd": {
        2: (Candidate(64, 0, 4, 1), Candidate(32, 0, 4, 1), Candidate(16, 0, 4, 1, widest=64)),
        4: (Candidate(32, 0, 8, 1), Candidate(16, 0, 4, 1), Candidate(16, 0, 4, 1, widest=64)),
    },
    "phase_c_state_bwd": {
        2: (Candidate(32, 0, 4, 3), Candidate(32, 0, 8, 2), Candidate(16, 0, 4, 1, widest=64)),
        4: (Candidate(32, 0, 8, 2), Candidate(16, 0, 8, 1), Candidate(16, 0, 4, 1, widest=64)),
    },
    "phase_b_bwd": {
        2: (Candidate(0, 16, 8, 2), Candidate(0, 16, 4, 1)),
        4: (Candidate(0, 32, 8, 2), Candidate(0, 16, 4, 1), Candidate(0, 16, 4, 1, widest=64)),
    },
    "operators_bwd": {
        2: (Candidate(0, 16, 8, 2, 128), Candidate(0, 16, 8, 1)),
        4: (Candidate(0, 16, 8, 2), Candidate(0, 16, 8, 1), Candidate(0, 16, 4, 1, widest=64)),
    },
    "phase_a_bwd": {
        2: (Candidate(64, 0, 8, 1), Candidate(32, 0, 8, 1), Candidate(16, 0, 4, 1, widest=64)),
        4: (Candidate(32, 0, 8, 1), Candidate(16, 0, 4, 1, widest=64), Candidate(16, 0, 4, 1, widest=32)),
    },
    "summary": {
        2: (Candidate(0, 64, 8, 2), Candidate(0, 32, 8, 2), Candidate(0, 16, 4, 1)),
        4: (Candidate(0, 32, 8, 2), Candidate(0, 16, 4, 1), Candidate(0, 16, 4, 1, widest=64)),
    },
    "adjoint_summary": {
        2: (Candidate(0, 32, 8, 2), Candidate(0, 16, 8, 2), Candidate(0, 16, 4, 1)),
        4: (Candidate(0, 32, 8, 2), Candidate(0, 16, 4, 1), Candidate(0, 16, 4, 1, widest=64)),
    },
}
# A kernel whose state or operand stays in registers holds it as one or two blocks.
_MOST_BLOCKS = {
    "phase_b": 2, "phase_c": 2, "phase_c_query_bwd": 2, "phase_b_bwd": 2, "summary": 2, "adjoint_summary": 2,
}  # fmt: skip


def launch_shape(kernel: str, width: int, precision: Precision, device: torch.device) -> LaunchShape:
    """Return the launch shape of ``kernel`` for heads of ``width`` channels on ``device``.

    Raises:
        NotImplementedError: Width above the limit, or no row fits; the message says what is needed and available.
    """
    return choose(kernel, width, 2 if precision is Precision.BF16 else 4, shared_memory(device))


@functools.lru_cache(maxsize=512)
def choose(kernel: str, width: int, operand_bytes: int, shared_bytes: int) -> LaunchShape:
    """Return the first row for ``kernel`` that fits ``shared_bytes`` of shared memory."""
    if width > SUPPORTED_WIDTH:
        raise NotImplementedError(
            f'impl="triton" supports D up to {SUPPORTED_WIDTH}, got D = {width}; use impl="torch"'
        )
    needed = 0
    for row in TABLE[kernel][operand_bytes]:
        block_d = max(16, min(row.widest, 1 << (width - 1).bit_length()))
        shape = LaunchShape(row.block_s, block_d, -(-width // block_d), *row[1:5])
        if shape.num_blocks > _MOST_BLOCKS.get(kernel, shape.num_blocks):
            continue
        needed = shared_estimate(kernel, shape, operand_bytes)
        if needed <= shared_bytes:
            return shape
    raise NotImplementedError(
        f"{kernel} at D = {width} needs {needed} bytes of shared memory, the device offers {shared_bytes}; "
        'use impl="torch"'
    )


def shared_estimate(kernel: str, shape: LaunchShape, operand_bytes: int) -> int:
    """Bound the shared memory that the compiler allocates for one program (checked against it by the compile tests)."""
    stages, blocks = shape.num_stages, shape.num_blocks
    square = shape.block_d * shape.block_d * operand_bytes
    tile = shape.block_s * shape.block_d * operand_bytes
    column = shape.block_d * shape.block_v * operand_bytes
    wide = shape.block_d * shape.block_v * 4
    spread = shape.block_d * shape.block_d * 4  # an fp32 accumulator that changes its layout on the way out
    pipelined = stages > 1
    scan = (stages * (blocks * blocks * square + blocks * column) if pipelined else square) + blocks * column
    bound = {
        "phase_a": max(spread, (5 * stages + 6) * tile // 2 if blocks == 1 else (5 * stages + 2) * tile),
        "phase_a_z": max(spread, (2 + stages + (blocks > 1) * stages) * tile),
        "phase_b": scan,
        "phase_c": blocks * square + tile + pipelined * 2 * stages * tile,
        "phase_c_query_bwd": blocks * square + 2 * tile + pipelined * 3 * stages * tile,
        "phase_c_state_bwd": max(spread, (4 * stages + 9) * tile // 2),
        "phase_b_bwd": (stages * (blocks * blocks * square + 2 * blocks * wide) if pipelined else square)
        + blocks * column,
        "operators_bwd": (10 if operand_bytes == 2 else 16) * stages * wide // 2,
        "phase_a_bwd": (3 if blocks == 1 else 1) * square + (2 if blocks == 1 else 3) * tile,
        "summary": scan,
        "adjoint_summary": (stages * (blocks * blocks * square + blocks * wide) if pipelined else square)
        + blocks * column,
    }
    return bound[kernel] + 1024


@functools.lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use on ``device``."""
    if device.type != "cuda":
        return 1 << 30  # the interpreter has no limit
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) or _UNKNOWN_DEVICE_BYTES


def token_shares(programs: int, spatial: int, shape: LaunchShape, device: torch.device) -> int:
    """Return how many programs share the tokens of a frame so that short clips, too, fill the device.

    A run-time value: no kernel is compiled for it.
    """
    wanted = -(-2 * _multiprocessors(device) // max(programs, 1))
    return max(1, min(wanted, -(-spatial // shape.block_s)))


@functools.lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
