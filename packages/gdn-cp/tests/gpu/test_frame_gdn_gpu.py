"""Context parallelism on a CUDA device: simulated ranks, and processes that share the device over gloo."""

from __future__ import annotations

import functools

import pytest
import torch
from frame_shares import Share, bound, compiled_worker, draw, error, run, simulated, step, upstream
from ranks import run_ranks

from gdn_cp import CPContext
from gdn_cp.cost_model import SCHEDULES

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

# bf16: the fold and the summaries are fp32, so that ranks cost little beside what 16 bits cost one device
LARGER = 1.25
FP32 = 1e-4  # ieee, relative Frobenius


def check(found: dict[str, float], alone: dict[str, float], dtype: torch.dtype) -> None:
    for name, value in found.items():
        limit = FP32 if dtype == torch.float32 else LARGER * alone[name]
        assert value <= limit, f"{name}: {value:.2e}, one device {alone[name]:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("counts", [(3, 2), (2, 0, 3)], ids=str)
def test_ranks_that_share_the_device_equal_one(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    share = Share(counts, 96, 3, 112, dtype)
    for found, alone, exchanges in run_ranks(len(counts), bound(share), limit=240.0, timeout=120.0, method="spawn"):
        check(found, alone, dtype)
        assert exchanges == ["cp_frame_gdn forward", "cp_frame_gdn backward"]


@pytest.mark.parametrize("schedule", ["chain", "doubling"])
def test_ranks_that_share_the_device_equal_one_on_other_schedules(schedule: str) -> None:
    share = Share((2, 0, 3), 96, 3, 112, torch.float32, schedule)
    for found, alone, exchanges in run_ranks(3, bound(share), limit=240.0, timeout=120.0, method="spawn"):
        check(found, alone, torch.float32)
        assert exchanges == ["cp_frame_gdn forward", "cp_frame_gdn backward"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_simulated_ranks_equal_one_device(dtype: torch.dtype, schedule: str) -> None:
    share = Share((4, 3, 0, 4), 96, 3, 112, dtype, schedule)
    whole = range(share.partition.total)
    exact = step(share, whole, None, "torch", torch.float64)
    alone = step(share, whole, None, "triton", dtype)
    leaves = draw(share)
    output = torch.cat(simulated(share, leaves), 1)
    output.backward(upstream(share).to(dtype))
    found = {"output": output.detach(), **{name: x.grad for name, x in leaves.items()}}
    check(*({name: error(x[name], exact[name]) for name in exact} for x in (found, alone)), dtype)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_waits_for_nothing_on_the_host(schedule: str) -> None:
    share = Share((2, 3), 64, 2, 64, torch.bfloat16, schedule)
    leaves, doutput = draw(share), upstream(share).bfloat16()

    def train() -> None:
        torch.cat(simulated(share, leaves), 1).backward(doutput)

    train()  # compiles, and makes the small tables that later calls find
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("counts", [(3,), (2, 3)], ids=["one rank", "two ranks"])
def test_a_compiled_step_equals_the_eager_one(counts: tuple[int, ...]) -> None:
    """Full graph with inductor; the kernels are the same, so are the numbers to fp32."""
    share = Share(counts, 96, 3, 112, torch.float32)
    worker = functools.partial(compiled_worker, share)
    for found, exchanges in run_ranks(len(counts), worker, limit=240.0, timeout=120.0, method="spawn"):
        assert exchanges == ["cp_frame_gdn forward", "cp_frame_gdn backward"][: 2 * (len(counts) > 1)]
        assert found.keys() >= {"output", "qkv", "beta", "decay"}
        for name, value in found.items():
            assert value <= 1e-6, f"{name}: {value:.2e}"


def test_a_context_of_one_rank_is_the_local_operation_to_the_last_bit() -> None:
    share = Share((3,), 96, 2, 64, torch.bfloat16)
    leaves = draw(share)
    found = run(share, leaves, range(3), CPContext.single(), "triton")
    assert torch.equal(found, run(share, leaves, range(3), None, "triton"))
