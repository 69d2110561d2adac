"""Every kernel, compiled without a GPU for every family of devices: shared memory, spills, matrix instructions."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
from requirements import require_compiler

require_compiler()
from kernel_compiler import LIMITS_KB, TARGETS, Call, Compiled, compile_call, recorded  # noqa: E402
from table_rows import MOST_ROWS  # noqa: E402

from gdn_kernels.frame_gdn import tiles  # noqa: E402

KERNELS = {f"{kernel}_kernel" for kernel in tiles.KERNELS} | {
    "qk_norm_kernel",
    "qk_norm_bwd_kernel",
    "fold_kernel",
}
FP32_ALWAYS = {"fold_kernel"}  # few products, of maps that carry the memory of a whole clip
PRECISIONS = ("bf16", "tf32", "ieee")
WIDTHS = (16, 64, 112, 128, 256)
SECONDS = 500
STACK_BUDGET = 1024  # bytes per thread; beyond that the kernels that spilled were slower than smaller tiles

# Every row once, for the family that the table was tuned on; then what each family takes by itself.
CHOSEN = (
    Call("sm_90", 112, "bf16", 0), Call("sm_90", 112, "bf16", 1), Call("sm_90", 64, "bf16", 2),
    Call("sm_90", 128, "tf32", 0), Call("sm_90", 64, "tf32", 1), Call("sm_90", 64, "tf32", 2),
    Call("sm_80", 128, "bf16"), Call("sm_100", 112, "bf16"), Call("sm_120", 112, "bf16"), Call("gfx942", 64, "bf16"),
    Call("sm_90", 256, "bf16"), Call("sm_80", 16, "ieee"), Call("sm_100", 16, "tf32"), Call("gfx942", 16, "ieee"),
    Call("sm_100", 112, "tf32"), Call("sm_100", 64, "ieee"), Call("sm_90", 64, "ieee"),
)  # fmt: skip


def every_call() -> tuple[Call, ...]:
    rows = (None, *range(MOST_ROWS))
    return tuple(Call(t, d, p, r) for t in TARGETS for d in WIDTHS for p in PRECISIONS for r in rows)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "call" in metafunc.fixturenames:
        calls = every_call() if metafunc.config.getoption("all_rows", False) else CHOSEN
        names = [f"{c.target}-{c.width}-{c.precision}-{'chosen' if c.row is None else f'row{c.row}'}" for c in calls]
        metafunc.parametrize("call", calls, ids=names, scope="module")


@pytest.fixture(scope="module")
def futures(request: pytest.FixtureRequest) -> Iterator[dict[Call, Future[dict[str, Compiled | str]]]]:
    calls = every_call() if request.config.getoption("all_rows", False) else CHOSEN
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=context) as pool:
        yield {call: pool.submit(compile_call, call) for call in calls}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def kernels(call: Call, futures: dict[Call, Future[dict[str, Compiled | str]]]) -> dict[str, Compiled]:
    """Return what every kernel of the call compiled to."""
    found = futures[call].result(timeout=SECONDS)
    if not found:
        pytest.skip(f"no row fits {LIMITS_KB[call.target]} KB at D = {call.width} in {call.precision}")
    errors = [f"{name}:\n{text}" for name, text in found.items() if isinstance(text, str)]
    assert not errors, "\n".join(errors)
    return {name: kernel for name, kernel in found.items() if isinstance(kernel, Compiled)}


def test_every_kernel_is_compiled_and_stores_something(call: Call, kernels: dict[str, Compiled]) -> None:
    assert kernels.keys() == KERNELS
    for name, kernel in kernels.items():
        assert kernel.stores, name


def test_shared_memory_is_within_the_estimate_and_the_limit(call: Call, kernels: dict[str, Compiled]) -> None:
    for name, kernel in kernels.items():
        if kernel.estimate is not None:
            assert kernel.shared <= kernel.estimate, f"{name}: {kernel}"
        if call.row is None:
            assert kernel.shared <= LIMITS_KB[call.target] * 1024, f"{name}: {kernel}"


def test_products_use_matrix_instructions_and_nothing_traps(call: Call, kernels: dict[str, Compiled]) -> None:
    for name, kernel in kernels.items():
        assert not kernel.traps, name  # an unsupported product becomes a bare trap, silently
        if kernel.uses_products and call.precision != "ieee" and name not in FP32_ALWAYS:
            assert kernel.matrix_products, name


def test_spills_stay_within_the_budget(call: Call, kernels: dict[str, Compiled]) -> None:
    for name, kernel in kernels.items():
        print(f"{call} {name}: {kernel.registers} registers, {kernel.stack} bytes of stack, {kernel.shared} shared")
    budget = STACK_BUDGET * -(-call.width // 128)  # a head of two blocks keeps twice the state in registers
    worst = {
        name: kernel.stack for name, kernel in kernels.items() if kernel.stack is not None and kernel.stack > budget
    }
    assert not worst, f"more than {budget} bytes of stack: {worst}"


def test_every_row_of_the_table_is_among_the_calls() -> None:
    compiled = {
        (launch.kernel.__name__.removesuffix("_kernel"), 2 if call.precision == "bf16" else 4, shape.block_s,
         shape.block_v, shape.num_warps, shape.num_stages)
        for call in CHOSEN if call.row is not None
        for launch in recorded(call.width, call.precision, call.row, 1 << 30)
        if (shape := launch.shape()) is not None
    }  # fmt: skip
    rows = {
        (kernel, operand_bytes, row.block_s, row.block_v, row.num_warps, row.num_stages)
        for kernel, by_bytes in tiles.TABLE.items()
        for operand_bytes, candidates in by_bytes.items()
        for row in candidates
    }
    assert rows <= compiled, rows - compiled
