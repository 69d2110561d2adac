"""Context parallelism with data, sharded and tensor parallelism: four processes on a 2 x 2 mesh, against one."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gdn_cp import CPContext, FramePartition, cp_frame_gdn
from gdn_kernels import frame_gdn
from gdn_models import BidirectionalGDN, all_reduce_gradients, apply_context_parallel, reduce_loss

FRAMES, ROWS, COLUMNS, C, H = 5, 2, 1, 12, 2
S, PARTITION = ROWS * COLUMNS, FramePartition((3, 2))
TOLERANCE = 1e-10

pytestmark = [
    pytest.mark.ranks,
    # the output of any Linear on the CPU is a view; nothing here writes into one
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]


class Model(nn.Module):
    """Two residual blocks, convolutions included."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BidirectionalGDN(dim=C, heads=H, conv_qv=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, (x.shape[1] // S, ROWS, COLUMNS))
        return x


def make() -> Model:
    torch.manual_seed(5)
    model = Model().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("beta_proj.bias", "dt_bias")):
                parameter.zero_()  # gates around one half: the past fades slowly enough to cross ranks
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64), alpha=0.3)
    return model


def sample(replica: int) -> tuple[Tensor, Tensor]:
    """Return input and target of one sample; replicas have different ones."""
    generator = torch.Generator().manual_seed(replica)
    x, target = (torch.randn(1, FRAMES * S, C, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target


def token_losses(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean(-1)


def one_process() -> dict[str, Tensor]:
    """Return the gradient of the mean over samples of the mean over their tokens."""
    model = make()
    losses = [token_losses(model(x), target).mean() for x, target in map(sample, range(2))]
    (sum(losses) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = float((found[name] - value).abs().max() / value.abs().max())
        assert error < TOLERANCE, f"{name}: {error:.1e}"


def mesh_of(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def local_sample(mesh: DeviceMesh, context: CPContext) -> tuple[Tensor, Tensor]:
    """Return this rank's frames of its replica's sample."""
    whole = sample(mesh.get_local_rank("dp"))
    x, target = (PARTITION.split(part.unflatten(1, (FRAMES, S)), context.rank, 1).flatten(1, 2) for part in whole)
    return x, target


def full(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients whole, whatever the wrapper holds of them."""
    grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


def check_everywhere(worker) -> None:
    expected = one_process()
    for found in run_ranks(4, worker):
        assert_close(found, expected)


def test_ddp_over_data_and_context_ranks() -> None:
    """DDP averages over all four ranks; `reduce_loss` weighs uneven shards."""

    def worker(rank: int) -> dict[str, Tensor]:
        mesh = mesh_of("dp", "cp")
        context = CPContext(mesh=mesh, mesh_axis="cp")
        model = DistributedDataParallel(apply_context_parallel(make(), context, PARTITION))
        x, target = local_sample(mesh, context)
        losses = token_losses(model(x), target)
        reduce_loss(losses.mean(), context, losses.numel()).backward()
        return full(model)

    check_everywhere(worker)


def test_fsdp_over_data_and_context_ranks() -> None:
    """FSDP2 shards parameters over all four ranks, and averages."""

    def worker(rank: int) -> dict[str, Tensor]:
        mesh = mesh_of("dp", "cp")
        context = CPContext(mesh=mesh, mesh_axis="cp")
        model = apply_context_parallel(make(), context, PARTITION)
        every = init_device_mesh("cpu", (4,))
        for block in model.blocks:
            fully_shard(block, mesh=every)
        fully_shard(model, mesh=every)
        x, target = local_sample(mesh, context)
        losses = token_losses(model(x), target)
        reduce_loss(losses.mean(), context, losses.numel()).backward()
        return full(model)

    check_everywhere(worker)


def test_fsdp_over_data_ranks_and_a_sum_over_context_ranks() -> None:
    """FSDP2 averages over data alone; this rank's part of the mean, then a sum over the context."""

    def worker(rank: int) -> dict[str, Tensor]:
        mesh = mesh_of("dp", "cp")
        context = CPContext(mesh=mesh, mesh_axis="cp")
        model = apply_context_parallel(make(), context, PARTITION)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        x, target = local_sample(mesh, context)
        (token_losses(model(x), target).sum() / (FRAMES * S)).backward()
        all_reduce_gradients(model, context)
        return full(model)

    check_everywhere(worker)


# ---- tensor parallelism: heads over one axis, frames over the other

WIDTH, HEADS = 6, 4
WEIGHTS = {"qkv": (3, HEADS, WIDTH, C), "beta": (HEADS, C), "decay": (HEADS, C), "proj": (HEADS, WIDTH, C)}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in WEIGHTS.items()}


def mix(x: Tensor, w: dict[str, Tensor], context: CPContext | None) -> Tensor:
    """Project, mix and project back with the heads that are there: a partial sum of the output over heads."""
    tokens = x.unflatten(1, (-1, S))
    qkv = torch.einsum("bnc,thdc->bnthd", x, w["qkv"])
    beta = torch.einsum("bfsc,hc->bhfs", tokens, w["beta"]).sigmoid()
    decay = torch.einsum("bfc,hc->bhf", tokens.mean(2), w["decay"]).sigmoid()
    options = {"direction": "bidirectional", "k_scale": 0.3, "eps": 0.5}
    if context is None:
        output = frame_gdn(qkv, beta, decay, **options).output
    else:
        output = cp_frame_gdn(qkv, beta, decay, context=context, partition=PARTITION, **options).output
    return torch.einsum("bnhd,hdc->bnc", output, w["proj"])


def test_heads_over_tensor_ranks_and_frames_over_context_ranks() -> None:
    """One context per tensor rank; a partial sum over heads is enough, since a loss that is linear in it adds up."""
    x, upstream = sample(0)

    def worker(rank: int) -> tuple[Tensor, dict[str, Tensor], int, int]:
        mesh = mesh_of("tp", "cp")
        context, part = CPContext(mesh=mesh, mesh_axis="cp"), mesh.get_local_rank("tp")
        heads = slice(part * HEADS // 2, (part + 1) * HEADS // 2)
        whole = weights()
        own = {name: (w[:, heads] if name == "qkv" else w[heads]).clone() for name, w in whole.items()}
        for w in own.values():
            w.requires_grad_()
        local, up = (PARTITION.split(t.unflatten(1, (FRAMES, S)), context.rank, 1).flatten(1, 2) for t in (x, upstream))
        y = mix(local, own, context)
        (y * up).sum().backward()
        all_reduce_gradients(own.values(), context)
        return y.detach(), {name: w.grad for name, w in own.items()}, part, context.rank

    whole = {name: w.requires_grad_() for name, w in weights().items()}
    expected = mix(x, whole, None)
    (expected * upstream).sum().backward()
    ranks = {(part, place): (y, grads) for y, grads, part, place in run_ranks(4, worker)}
    outputs = [ranks[0, place][0] + ranks[1, place][0] for place in range(2)]
    assert_close({"y": torch.cat(outputs, 1)}, {"y": expected.detach()})
    for place in range(2):
        halves = [ranks[part, place][1] for part in range(2)]
        found = {name: torch.cat([half[name] for half in halves], 1 if name == "qkv" else 0) for name in whole}
        assert_close(found, {name: w.grad for name, w in whole.items()})
