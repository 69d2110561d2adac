"""Compile the kernels of a call for a device that is not there, and measure what the compiler made of them.

The launchers run on small CPU tensors with every kernel replaced by a recorder: what is compiled is what they launch.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from table_rows import row_first
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from gdn_kernels.frame_gdn import (
    adjoint_summary,
    fold,
    phase_a,
    phase_a_bwd,
    phase_b,
    phase_b_bwd,
    phase_c,
    phase_c_bwd,
    qk_norm,
    stages,
    summary,
    tiles,
)
from gdn_kernels.types import Direction, FrameBoundary, FrameInputs, FrameOptions, Impl, Precision

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
LIMITS_KB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
NO_LIMIT = 1 << 30
_MODULES = (
    qk_norm, phase_a, phase_b, phase_c, phase_a_bwd, phase_b_bwd, phase_c_bwd, summary, adjoint_summary, fold,
)  # fmt: skip
_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Call(NamedTuple):
    """A call of `frame_gdn`, forward and backward: width, precision, and which row of the table each kernel takes.

    ``row``: number of a row of each kernel, counted around, the others following if it does not admit the width; None:
    the first that fits the target.
    """

    target: str
    width: int
    precision: str
    row: int | None = None


class Launch(NamedTuple):
    """One recorded launch: the kernel, its arguments by position and by name."""

    kernel: JITFunction[Any]
    positional: tuple[Any, ...]
    named: dict[str, Any]

    def shape(self) -> tiles.LaunchShape | None:
        """Return the launch shape, None for a kernel without a row."""
        if "NUM_BLOCKS" not in self.named:
            return None
        size = {name: self.named.get(name, 0) for name in ("BLOCK_S", "BLOCK_D", "NUM_BLOCKS", "BLOCK_V", "STAGES")}
        return tiles.LaunchShape(
            size["BLOCK_S"], size["BLOCK_D"], size["NUM_BLOCKS"], size["BLOCK_V"], self.named["num_warps"],
            size["STAGES"], self.named.get("maxnreg", 0),
        )  # fmt: skip


class Compiled(NamedTuple):
    """What became of one kernel; ``estimate`` is None for one without a row, ``stack`` where it is not reported."""

    shape: tiles.LaunchShape | None
    shared: int
    estimate: int | None
    registers: int
    stack: int | None
    traps: int
    stores: int
    matrix_products: int
    uses_products: bool


def compile_call(call: Call) -> dict[str, Compiled | str]:
    """Return, by kernel, what was compiled, or the error's text; empty if no row fits the target."""
    try:
        launches = recorded(call.width, call.precision, call.row, _limit(call))
    except NotImplementedError:
        return {}
    found: dict[str, Compiled | str] = {}
    for launch in launches:
        try:
            found[launch.kernel.__name__] = compile_launch(launch, call)
        except Exception:  # whatever the compiler raises is the finding
            found[launch.kernel.__name__] = traceback.format_exc(limit=-3)
    return found


def _limit(call: Call) -> int:
    return NO_LIMIT if call.row is not None else LIMITS_KB[call.target] * 1024


@functools.lru_cache(maxsize=32)
def recorded(width: int, precision: str, row: int | None, limit: int) -> tuple[Launch, ...]:
    """Return the launches of one bidirectional call with every flag, its backward, its summary and a fold."""
    frames, spatial, heads = 2, 40, 2
    dtype = torch.float32 if precision == "ieee" else torch.bfloat16
    qkv = torch.randn(1, frames * spatial, 3, heads, width).to(dtype).requires_grad_()
    weight, angle = torch.rand(heads, width), torch.rand(frames * spatial, width // 2)
    inputs = FrameInputs(
        qkv, None, None, None, torch.rand(1, heads, frames, spatial), torch.rand(1, heads, frames), weight, weight,
        angle.cos(), angle.sin(), torch.ones(1, frames),
    )  # fmt: skip
    options = FrameOptions(
        True, True, True, Direction.BIDIRECTIONAL, (1,), 0.3, 1e-5, 1e-6, Precision(precision), Impl.TRITON
    )
    launches: list[Launch] = []
    with recording(launches.append), row_first(row or 0), _device_of(limit):
        output, _, _ = stages.apply(inputs, options, FrameBoundary(None, None, None, None))
        torch.autograd.grad(output, qkv, torch.randn_like(output))
        nothing = FrameBoundary(None, None, None, None)
        stages.adjoint(inputs, options, nothing, torch.randn_like(output), None)
        summary_ = stages.summarize(inputs, options)
        assert summary_.transition_z is not None
        squares = (summary_.transition_kv[None], summary_.transition_z[None])
        states = (squares[0], squares[1][..., 0].contiguous())
        forward = fold.FoldLine(squares, states, (None, None), range(1), dropped=(0,))
        fold.fold_lines([forward, forward._replace(transposed=True, starts=(states[0][0], states[1][0]))])
    unique = {launch.kernel.__name__: launch for launch in launches}
    return tuple(unique.values())


@contextmanager
def recording(record: Callable[[Launch], None], modules: Sequence[Any] = _MODULES) -> Iterator[None]:
    class Recorder:
        def __init__(self, kernel: JITFunction[Any]) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *positional, **named: record(Launch(self.kernel, positional, named))

    kernels = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, JITFunction)
    ]
    try:
        for module, name, kernel in kernels:
            setattr(module, name, Recorder(kernel))
        yield
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


@contextmanager
def _device_of(limit: int) -> Iterator[None]:
    """Let the CPU stand for a device that offers ``limit`` bytes of shared memory."""
    shared_memory = tiles.shared_memory
    try:
        tiles.shared_memory = lambda device: limit
        yield
    finally:
        tiles.shared_memory = shared_memory


def source_of(launch: Launch) -> ASTSource:
    """Return what Triton compiles for a launch: types, constants and divisibility by 16 follow from its arguments."""
    kernel = launch.kernel
    values = {**dict(zip(kernel.arg_names, launch.positional)), **launch.named}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        special = not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (special and value is not True and value == 1):
            signature[name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, int):
            signature[name] = "i32"
            if special and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(kernel, signature, constants, attributes)


def compile_launch(launch: Launch, call: Call) -> Compiled:
    options = {name: launch.named[name] for name in _LAUNCH_OPTIONS if name in launch.named}
    if call.target.startswith("gfx"):
        options.pop("maxnreg", None)
    compiled = triton.compile(source_of(launch), target=TARGETS[call.target], options=options)
    shape, name = launch.shape(), launch.kernel.__name__
    estimate = None
    if shape is not None:
        estimate = tiles.shared_estimate(name.removesuffix("_kernel"), shape, 2 if call.precision == "bf16" else 4)
    is_cuda = "ptx" in compiled.asm
    text = str(compiled.asm["ptx" if is_cuda else "amdgcn"])
    registers, stack = _resources(compiled.asm["cubin"]) if is_cuda else _resources_of_amdgcn(text)
    product = r"wgmma\.mma_async|mma\.sync|tcgen05\.mma" if is_cuda else r"v_mfma"
    return Compiled(
        shape, compiled.metadata.shared, estimate, registers, stack,
        len(re.findall(r"^\s*(?:trap;|s_trap)", text, re.MULTILINE)),
        len(re.findall(r"st\.global" if is_cuda else r"(?:global|buffer)_store", text)),
        len(re.findall(product, text)), "tt.dot" in str(compiled.asm["ttir"]),
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and bytes of stack: spills and what is indexed at run time."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", report)[0]
    return int(registers), int(stack)


def _resources_of_amdgcn(text: str) -> tuple[int, int]:
    registers = re.findall(r"\.vgpr_count:\s+(\d+)", text)
    stack = re.findall(r"\.private_segment_fixed_size:\s+(\d+)", text)
    return int(registers[0]), int(stack[0])
