"""Context parallelism with data, sharded and tensor parallelism: four processes on a 2 x 2 mesh, against one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import randomized
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gdn_cp import CPContext, FramePartition
from gdn_models import (
    BidirectionalGDN,
    ChunkCausalGDN,
    FrameGDN,
    all_reduce_gradients,
    apply_context_parallel,
    reduce_loss,
)

FRAMES, ROWS, COLUMNS, C, H = 5, 2, 1, 12, 2
S, PARTITION = ROWS * COLUMNS, FramePartition((3, 2))
TOLERANCE = 1e-10
GUIDE = Path(__file__).parent.parent / "docs/guide/tensor_parallelism.md"

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
    return randomized(Model()).double()


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
    """FC-D11: DDP averages over all four ranks; `reduce_loss` weighs uneven shards."""

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
    """FC-D11: FSDP2 shards parameters over all four ranks, and averages."""

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
    """FC-D11: FSDP2 averages over data alone; this rank's part of the mean, then a sum over the context."""

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


def guide(name: str) -> Any:
    """Return what the guide on tensor parallelism defines: what it shows is what is tested."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(code, str(GUIDE), "exec"), names)
    return names[name]


def split_block(cls: type[nn.Module], **options: object) -> nn.Module:
    torch.manual_seed(7)
    block = cls(dim=16, heads=4, qk_norm=False, **options)
    return randomized(block).double()


@pytest.mark.parametrize(
    ("cls", "options", "keywords"),
    [
        (BidirectionalGDN, {"conv_qv": True, "qkv_bias": True}, {}),
        (ChunkCausalGDN, {"output_gate": False, "eps": 0.5}, {"chunk_starts": (2, 4)}),
        (FrameGDN, {"conv_size": 0, "rope_theta": None}, {}),
    ],
)
def test_halves_of_the_heads_over_tensor_ranks_and_frames_over_context_ranks(
    cls: type[nn.Module], options: dict, keywords: dict
) -> None:
    """A block with half of the heads on each tensor rank, sums over that axis inside the ranks, frames over the other.

    Output and gradient of the input are whole on every rank; gradients of parameters are those of the rank's heads.
    """
    tensor_parallel, heads_of = guide("TensorParallel"), guide("heads_of")
    generator = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(2, FRAMES, S * 16, generator=generator, dtype=torch.float64) for _ in range(2))

    def worker(rank: int) -> tuple[int, int, Tensor, Tensor, dict[str, Tensor]]:
        mesh = mesh_of("tp", "cp")
        context = CPContext(mesh=mesh, mesh_axis="cp")
        model = apply_context_parallel(tensor_parallel(split_block(cls, **options), mesh["tp"]), context, PARTITION)
        local, up = (PARTITION.split(t, context.rank, 1).reshape(2, -1, 16) for t in (x, upstream))
        local = local.detach().requires_grad_()
        y = model(local, (PARTITION.counts[context.rank], ROWS, COLUMNS), **keywords)
        y.backward(up)
        all_reduce_gradients(model, context)
        gradients = {name: p.grad for name, p in model.block.named_parameters()}
        return mesh.get_local_rank("tp"), context.rank, y.detach(), local.grad, gradients

    block, whole = split_block(cls, **options), x.reshape(2, -1, 16).requires_grad_()
    y = block(whole, (FRAMES, ROWS, COLUMNS), **keywords)
    y.backward(upstream.reshape(y.shape))
    of_gradients = split_block(cls, **options)
    with torch.no_grad():
        for name, parameter in of_gradients.named_parameters():
            parameter.copy_(block.get_parameter(name).grad)
    sizes = dict.fromkeys(range(2), 0)
    for part, place, found, dx, gradients in run_ranks(4, worker):
        span = slice(PARTITION.starts[place] * S, PARTITION.starts[place + 1] * S)
        assert_close({"y": found, "dx": dx}, {"y": y.detach()[:, span], "dx": whole.grad[:, span]})
        assert_close(gradients, heads_of(of_gradients, part, 2).state_dict())
        sizes[place] += sum(gradient.numel() for gradient in gradients.values())
    assert set(sizes.values()) == {sum(p.numel() for p in block.parameters())}, "nothing is left out, or there twice"


def test_a_norm_over_all_channels_is_refused_where_a_block_holds_some() -> None:
    """Normalised over half of the channels it would be another model: refused, on the ranks of a context as well."""
    block = BidirectionalGDN(dim=16, heads=4)
    half = guide("heads_of")(block, 0, 2)
    with pytest.raises(NotImplementedError, match="^qk_norm over 16 channels, of which this block holds 8, is not"):
        half(torch.zeros(1, 4, 16), (2, ROWS, COLUMNS))
