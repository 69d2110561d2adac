"""The FLA backend on a CUDA device against the plain recurrence in fp64: simulated ranks, and processes over gloo."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from delta_product_gpu import backend_with_few_configurations, bound, step
from delta_product_shares import SCALE, Share, by_hand, error
from ranks import run_ranks

from gdn_cp import CPContext, TokenPartition
from gdn_cp.delta_product import gdp_chunkwise_context_parallel

# warnings of FLA, and of Triton when it compiles FLA's kernels, are not ours
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if importlib.util.find_spec("fla") is None:
    pytest.skip("needs the package fla-core", allow_module_level=True)

# relative Frobenius, bf16: operands, factors, new values and chunk states are each rounded once, to 2 ** -9
STATES, GRADIENTS, GATES = 4e-3, 8e-3, 1.5e-2
TOLERANCE = {
    "output": STATES, "final_state": STATES, "dq": GRADIENTS, "dk": GRADIENTS, "dv": GRADIENTS,
    "dinitial_state": GRADIENTS, "dbeta": GATES, "dg": GATES,
}  # fmt: skip
LARGER = 1.25  # what ranks may cost beside one: the fold is fp32, summaries are sums in fp32 of 16-bit products


@pytest.fixture(scope="module")
def backend() -> Any:
    return backend_with_few_configurations()


SHARES = [
    Share((200,), steps=2, heads=(2, 2), widths=(64, 64), strength=1.0),
    Share((100, 0, 90), (150, 0, 40), steps=3, heads=(2, 2), widths=(64, 64), strength=1.0),
    Share((70, 100, 60), (100, 130), steps=1, heads=(2, 4), widths=(128, 128), strength=1.0),
    Share((130, 70, 50), steps=3, heads=(2, 4), widths=(128, 128), strength=1.0),
    Share((80, 70), steps=3, heads=(2, 4), widths=(64, 64), strength=1.0),
    Share((90, 30, 80), (60, 140), steps=2, heads=(2, 2), widths=(80, 128), strength=1.0, states=False),
    Share((100, 20, 80), steps=1, heads=(2, 2), widths=(80, 128), strength=1.0, gated=False),
    Share((60, 90), steps=3, heads=(1, 2), widths=(32, 32), strength=1.0),
    Share((70, 60), (90, 40), steps=2, heads=(1, 1), widths=(256, 256), strength=1.0),
]


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_simulated_ranks_equal_the_recurrence(share: Share, backend: Any) -> None:
    exact, found = share.exact(torch.bfloat16, "cuda"), by_hand(share, backend, torch.bfloat16, "cuda")
    errors = {name: error(x, exact[name]) for name, x in found.items()}
    assert all(value <= TOLERANCE[name] for name, value in errors.items()), errors


def test_ranks_cost_little_beside_one_without_decay(backend: Any) -> None:
    """beta up to 2 and no decay: nothing damps what rounding does, on one device as on three ranks."""
    three = Share((60, 40, 60), steps=3, gated=False, heads=(2, 2), widths=(64, 64))
    exact = three.exact(torch.bfloat16, "cuda")
    alone = by_hand(dataclasses.replace(three, counts=(160,)), backend, torch.bfloat16, "cuda")
    for name, x in by_hand(three, backend, torch.bfloat16, "cuda").items():
        assert error(x, exact[name]) <= LARGER * error(alone[name], exact[name]), name


@pytest.mark.parametrize("autocast", [False, True])
def test_the_published_function_on_one_rank(autocast: bool, backend: Any) -> None:
    share = Share((190,), (150, 0, 40), steps=3, heads=(2, 2), widths=(64, 64), strength=1.0)
    exact = share.exact(torch.bfloat16, "cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = step(share, 0, CPContext.single(), backend, torch.bfloat16)
    errors = {name: error(x, exact[name]) for name, x in found.items()}
    assert all(value <= TOLERANCE[name] for name, value in errors.items()), errors
    assert {name: x.dtype for name, x in found.items() if name in ("output", "dg", "dinitial_state")} == {
        "output": torch.bfloat16, "dg": torch.float32, "dinitial_state": torch.float32
    }  # fmt: skip


def test_a_step_repeats_to_the_last_bit_and_waits_for_nothing(backend: Any) -> None:
    share = Share((190,), (150, 0, 40), steps=3, heads=(2, 2), widths=(64, 64), strength=1.0, states=False)
    metadata = TokenPartition(share.counts).packed((0, 150, 150, 190), 0, "cuda")
    leaves = {name: x.requires_grad_() for name, x in share.leaves(torch.bfloat16, "cuda").items()}
    doutput = share.weights(torch.bfloat16, "cuda")[0]
    operands = [leaves[name] for name in ("q", "k", "v", "g", "beta")]

    def train() -> list[torch.Tensor]:
        output = gdp_chunkwise_context_parallel(
            *operands, None, share.steps, SCALE, None, backend, metadata=metadata, context=CPContext.single()
        )
        return [output.detach(), *torch.autograd.grad(output, operands, doutput)]

    first = train()  # tunes and compiles, and makes the small tables that later calls find
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("lengths", [None, (100, 90)], ids=str)
def test_ranks_that_share_the_device_equal_the_recurrence(lengths: tuple[int, ...] | None) -> None:
    share = Share((70, 120), lengths, steps=2, heads=(2, 2), widths=(64, 64), strength=1.0)
    for errors, exchanges in run_ranks(2, bound(share), limit=420.0, timeout=300.0, method="spawn"):
        assert all(value <= TOLERANCE[name] for name, value in errors.items()), errors
        assert exchanges == ["chunkwise_cp forward", "chunkwise_cp backward"]
