"""A second backward through every operation of the package: refused by name, for whichever inputs, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdn_cp import (
    CPContext,
    FramePartition,
    cp_frame_gdn,
    cp_frame_gdn_numerator,
    cp_frame_gdn_raw,
    cp_frame_gdn_scan,
    cp_fused_cam_gdn_num_autograd,
    cp_fused_gdn_chunkwise_raw_autograd,
    halo_exchange,
    simulate,
)
from gdn_cp.delta_product.common import GDPChunkwiseContextParallel, gdp_chunkwise_context_parallel
from gdn_cp.delta_product.torch import TorchGatedDeltaProductCPBackend
from gdn_cp.frame_op import arguments_of
from gdn_cp.fused import _CpFusedGdnOutput, _CpFusedGdnPrep
from gdn_cp.halo_op import call_op
from gdn_kernels import FrameState
from gdn_kernels.frame_gdn.op import frame_gdn_arguments

ONE, PARTITION = CPContext.single(), FramePartition((2, 2))
B, H, F, S, D = 1, 2, 2, 3, 4
SHAPES = {
    "qkv": (B, F * S, 3, H, D), "q": (B, F * S, H, D), "k": (B, F * S, H, D), "v": (B, F * S, H, D),
    "beta": (B, H, F, S), "decay": (B, H, F), "q_weight": (H * D,), "k_weight": (H * D,), "kv": (B, H, D, D),
    "z": (B, H, D), "W_kv": (H, F, D, D), "U_kv": (H, F, D, D), "W_z": (H, F, D, D), "U_z": (H, F, D),
    "query": (B, F, H, D), "keys": (B, 2 * F, H, D), "values": (B, 2 * F, H, D), "strength": (B, 2 * F, H),
    "log_decay": (B, F, H), "state": (B, H, D, D),
}  # fmt: skip
Call = Callable[..., Tensor]


def leaves_of(names: str) -> list[Tensor]:
    """Return leaves in fp64: entries in (0, 1/2), but log decays in (-1/2, 0)."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.rand(SHAPES[name], generator=generator, dtype=torch.float64) / 2 for name in names.split())
    return [(-x if name == "log_decay" else x).requires_grad_() for name, x in zip(names.split(), drawn, strict=True)]


def tables() -> tuple[Tensor, Tensor]:
    angle = torch.linspace(0.0, 1.0, F * S * D // 2, dtype=torch.float64).view(F * S, D // 2)
    return angle.cos().repeat_interleave(2, 1), torch.stack((-angle.sin(), angle.sin()), 2).flatten(1)


def scan(*given: Tensor) -> Tensor:
    return cp_frame_gdn_scan(*given, ONE)[0]


def raw(qkv: Tensor, beta: Tensor, decay: Tensor, *weights: Tensor, recompute: bool = True) -> Tensor:
    return cp_fused_gdn_chunkwise_raw_autograd(
        qkv, beta, decay, *weights, *tables(), F=F, S=S, group=ONE, dot_precision=2, use_checkpoint=recompute
    ).num


def numerator(*given: Tensor) -> Tensor:
    operands = (x.permute(0, 2, 3, 1) for x in given[:3])
    return cp_fused_cam_gdn_num_autograd(*operands, *given[3:], F=F, S=S, group=ONE)[0]


def simulated(qkv: Tensor, beta: Tensor, decay: Tensor, *state: Tensor) -> Tensor:
    shard = dict(qkv=qkv, beta=beta, decay=decay, initial_state=FrameState(*state))
    return simulate.frame_gdn([shard, shard], PARTITION)[1].output


def delta_product(*given: Tensor, context: CPContext = ONE) -> Tensor:
    *streams, state = given
    return gdp_chunkwise_context_parallel(
        *streams, None, 2, 1.0, None, TorchGatedDeltaProductCPBackend(), initial_state=state, output_final_state=True,
        context=context,
    )[0]  # fmt: skip


def delta_product_applied(context: CPContext, *given: Tensor) -> Tensor:
    """As published code calls it."""
    backend = TorchGatedDeltaProductCPBackend()
    found: Tensor = GDPChunkwiseContextParallel.apply(
        *given, None, 2, 1.0, context.process_group, backend, 0, context.size
    )
    return found


STREAMS = "query keys values log_decay strength"
LOCAL = {
    "cp_frame_gdn_scan": (scan, "W_kv U_kv W_z U_z"),
    "gdn_cp.fused": (raw, "qkv beta decay q_weight k_weight"),
    "gdn_cp.fused, kept": (lambda *x: raw(*x, recompute=False), "qkv beta decay q_weight k_weight"),
    "gdn_cp.fused, numerator": (numerator, "q k v beta decay"),
    "_CpFusedGdnPrep": (
        lambda *x: _CpFusedGdnPrep.apply(*x, *tables(), F, S, 0.6)[0], "qkv beta decay q_weight k_weight",
    ),
    "_CpFusedGdnOutput": (
        lambda qkv, *x: _CpFusedGdnOutput.apply(qkv, *tables(), *x, D, F, S, 2)[0], "qkv W_kv U_z",
    ),
    "simulate.frame_gdn": (simulated, "qkv beta decay kv z"),
    "gdp_chunkwise_context_parallel": (delta_product, f"{STREAMS} state"),
}  # fmt: skip
ON_RANKS = {
    "cp_frame_gdn": (
        lambda context, qkv, beta, decay, *state: cp_frame_gdn(
            qkv, beta, decay, context=context, direction="bidirectional", initial_state=FrameState(*state)
        ).output,
        "qkv beta decay kv z",
    ),
    "cp_frame_gdn, raw": (
        lambda context, *x: cp_frame_gdn_raw(*x, context=context, direction="reverse").numerator, "qkv beta decay",
    ),
    "cp_frame_gdn, numerator": (
        lambda context, *x: cp_frame_gdn_numerator(*x[:-1], context=context, initial_state=x[-1]).numerator,
        "q k v beta decay kv",
    ),
    "halo_exchange": (lambda context, x: halo_exchange(x, 1, 1, 1, context, PARTITION).square(), "query"),
    "gdp_chunkwise_context_parallel": (
        lambda context, *x: delta_product(*x, context=context), f"{STREAMS} state",
    ),
    "gdp_chunkwise_context_parallel, applied": (delta_product_applied, STREAMS),
}  # fmt: skip


def refused(name: str, loss: Tensor, leaves: list[Tensor]) -> int:
    """Take every second backward, for all leaves and for each alone; return how many raised as they must."""
    match = f"^{name.split(',')[0]} is differentiable once; its gradients cannot be differentiated again$"
    with pytest.raises(NotImplementedError, match=match):
        loss.backward(retain_graph=True)
    for leaf in leaves:
        with pytest.raises(NotImplementedError, match=match):
            torch.autograd.grad(loss, leaf, retain_graph=True)
    return 1 + len(leaves)


@pytest.mark.parametrize("name", LOCAL)
def test_one_rank_refuses_a_second_backward(name: str) -> None:
    """FC-A03: whichever gradient is differentiated, for whichever input; the first ones are those without a graph."""
    call, names = LOCAL[name]
    leaves = leaves_of(names)
    expected = torch.autograd.grad(call(*leaves).sum(), leaves, materialize_grads=True)
    found = torch.autograd.grad(call(*leaves).sum(), leaves, create_graph=True, materialize_grads=True)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
        if x.grad_fn:
            refused(name, x.square().sum(), leaves)
    assert any(x.grad_fn for x in found)


@pytest.mark.ranks
def test_every_rank_refuses_a_second_backward() -> None:
    """FC-A03: and none of them waits for another."""

    def worker(rank: int) -> dict[str, int]:
        context, count = CPContext(dist.group.WORLD), {}
        for name, (call, names) in ON_RANKS.items():
            leaves = leaves_of(names)
            expected = torch.autograd.grad(call(context, *leaves).sum(), leaves)
            found = torch.autograd.grad(call(context, *leaves).sum(), leaves, create_graph=True)
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
            count[name] = refused(name, found[0].square().sum(), leaves)
        return count

    expected = {name: 1 + len(names.split()) for name, (_, names) in ON_RANKS.items()}
    assert run_ranks(2, worker) == [expected] * 2


@pytest.mark.ranks
def test_the_operators_of_a_graph_refuse_it_too() -> None:
    def worker(rank: int) -> int:
        context, (qkv, beta, decay, *state) = CPContext(dist.group.WORLD), leaves_of("qkv beta decay kv z")
        checked = frame_gdn_arguments(
            qkv, beta, decay, None, None, None, 1.0, "forward", None, None, FrameState(*state), False, 1e-5, 1e-6, None,
            "torch", divide=True,
        )  # fmt: skip
        arguments = arguments_of("cp_frame_gdn", context, PARTITION, None, False, *checked)
        output = torch.ops.gdn_cp.frame_gdn(*arguments)[0]
        (g,) = torch.autograd.grad(output.sum(), qkv, create_graph=True)
        count = refused("cp_frame_gdn", g.square().sum(), [qkv, beta, decay, *state])
        x = leaves_of("query")[0].movedim(1, 0)
        extended = call_op(x, context, PARTITION, 1, 1, 0.0)
        (g,) = torch.autograd.grad(extended.square().sum(), x, create_graph=True)
        return count + refused("halo_exchange", g.square().sum(), [x])

    assert run_ranks(2, worker) == [6 + 2] * 2


def test_a_scan_runs_again_in_a_checkpoint() -> None:
    """A checkpoint unpacks what was saved a single time."""
    leaves = leaves_of("W_kv U_kv W_z U_z")
    expected = torch.autograd.grad(scan(*leaves).sum(), leaves)
    for create_graph in (False, True):
        y = checkpoint(scan, *leaves, use_reentrant=False)
        found = torch.autograd.grad(y.sum(), leaves, create_graph=create_graph)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
