"""Ranks on the Triton implementation, kernels in the interpreter, against one device on torch in fp64."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clips import tensors_of
from ranks import run_ranks
from torch import Tensor

from gdn_cp import CPContext, FramePartition, cp_frame_gdn, cp_frame_gdn_numerator, simulate
from gdn_cp.cost_model import Link
from gdn_kernels import frame_gdn, frame_gdn_numerator

pytestmark = pytest.mark.interpret
if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1 in the environment", allow_module_level=True)

B, H, F, S, D = 1, 2, 4, 2, 4
STARTS = (1, 3)
# A few hundred sums of products over D, S and F in another order; the division is kept away from zero by eps.
TOLERANCE = 256 * torch.finfo(torch.float32).eps


def leaves_of(kind: str, direction: str, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    leaves = {"beta": torch.sigmoid(normal(B, H, F, S)), "decay": torch.sigmoid(normal(B, H, F) + 1)}
    if kind == "numerator":
        leaves |= {name: 0.4 * normal(B, F * S, H, D) for name in ("q", "k", "v")}
    else:
        leaves |= {"qkv": normal(B, F * S, 3, H, D), "q_norm_weight": 1 + 0.3 * normal(H * D)}
        leaves["k_norm_weight"] = 1 + 0.3 * normal(H * D)
    if direction != "reverse":
        leaves["kv"] = normal(B, H, D, D)
        if kind != "numerator":
            leaves["z"] = 0.5 + normal(B, H, D).abs()
    return {name: x.float().to(dtype).requires_grad_() for name, x in leaves.items()}  # the same numbers in both dtypes


def arguments(leaves: dict[str, Tensor], kind: str, direction: str, span: range, impl: str) -> dict[str, Any]:
    given = tensors_of(leaves, span, S)
    given |= {"direction": direction, "impl": impl, "output_final_state": "kv" in leaves}
    if direction == "bidirectional":
        given["chunk_starts"] = STARTS
    return given | ({"k_scale": 0.3} if kind == "output" else {})


def loss_of(result: Any, span: range) -> Tensor:
    """Return this rank's part of a loss over the output; the final state counts once."""
    weights = torch.randn(B, F * S, H, D, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    own = weights[:, span.start * S : span.stop * S].to(result[0].dtype)
    loss = (result[0] * own).sum()
    state = result[-1]
    if state is not None and span.start == 0:
        loss = loss + sum(x.square().sum() for x in (state if isinstance(state, tuple) else (state,)))
    return loss


def expected_of(kind: str, direction: str, **changes: bool) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = leaves_of(kind, direction, torch.float64)
    given = arguments(leaves, kind, direction, range(F), "torch") | changes
    result = frame_gdn(eps=0.5, **given) if kind == "output" else frame_gdn_numerator(**given)
    loss_of(result, range(F)).backward()
    return result[0].detach(), {name: x.grad for name, x in leaves.items()}


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    error = float((found.detach().double() - expected).norm() / expected.norm())
    assert error < TOLERANCE, f"{name}: {error:.1e}"


@pytest.mark.parametrize("counts, save_transitions", [((2, 2), True), ((1, 0, 3), False)], ids=str)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["output", "numerator"])
def test_simulated_ranks_equal_one_device(
    kind: str, direction: str, counts: tuple[int, ...], save_transitions: bool
) -> None:
    partition, leaves = FramePartition(counts), leaves_of(kind, direction, torch.float32)
    shards = [arguments(leaves, kind, direction, partition.span(rank), "triton") for rank in range(len(counts))]
    flag = {"save_transitions": save_transitions}
    if kind == "output":
        results: Any = simulate.frame_gdn(shards, partition, eps=0.5, **flag)
    else:
        results = simulate.frame_gdn_numerator(shards, partition, **flag)
    sum(loss_of(result, partition.span(rank)) for rank, result in enumerate(results)).backward()
    output, gradients = expected_of(kind, direction)
    assert_close(torch.cat([result[0] for result in results], 1), output, "output")
    for name, gradient in gradients.items():
        given = leaves[name].grad
        assert given is not None, name
        assert_close(given, gradient, name)


@pytest.mark.parametrize("schedule", ["chain", "doubling"])
@pytest.mark.parametrize("kind", ["output", "numerator"])
def test_simulated_ranks_equal_one_device_on_other_schedules(kind: str, schedule: str) -> None:
    """No final state; its part of the loss is left out, as of a rank that ignores it."""
    partition, leaves = FramePartition((1, 0, 3)), leaves_of(kind, "bidirectional", torch.float32)
    shards = [arguments(leaves, kind, "bidirectional", partition.span(rank), "triton") for rank in range(3)]
    shards = [{**shard, "output_final_state": False} for shard in shards]
    flag = {"schedule": schedule, "link": Link("cuts a chain", 1e-3, 1e-3)}
    if kind == "output":
        results: Any = simulate.frame_gdn(shards, partition, eps=0.5, **flag)
    else:
        results = simulate.frame_gdn_numerator(shards, partition, **flag)
    sum(loss_of(result, partition.span(rank)) for rank, result in enumerate(results)).backward()
    output, gradients = expected_of(kind, "bidirectional", output_final_state=False)
    assert_close(torch.cat([result[0] for result in results], 1), output, "output")
    for name, gradient in gradients.items():
        given = leaves[name].grad
        assert given is not None, name
        assert_close(given, gradient, name)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["output", "numerator"])
def test_ranks_equal_one_device(kind: str) -> None:
    partition = FramePartition((3, 1))

    def worker(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = leaves_of(kind, "bidirectional", torch.float32)
        given = arguments(leaves, kind, "bidirectional", partition.span(rank), "triton")
        given |= {"context": CPContext(dist.group.WORLD), "partition": partition}
        result = cp_frame_gdn(eps=0.5, **given) if kind == "output" else cp_frame_gdn_numerator(**given)
        loss_of(result, partition.span(rank)).backward()
        return result[0].detach(), {name: x.grad for name, x in leaves.items()}

    found = run_ranks(2, worker)
    output, gradients = expected_of(kind, "bidirectional")
    assert_close(torch.cat([result for result, _ in found], 1), output, "output")
    for name, gradient in gradients.items():
        assert_close(sum(grads[name] for _, grads in found), gradient, name)
