"""Two data-parallel replicas of two context-parallel ranks each, sharded by FSDP2: four processes on the CPU.

Run it as it is, it starts its own processes:  python fsdp_and_context_parallel.py
"""

import datetime
import tempfile
import warnings

import torch
import torch._dynamo  # the optimiser imports it, which takes each process seconds: once, before they fork
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gdn_cp import CPContext, FramePartition
from gdn_models import BidirectionalGDN, apply_context_parallel, reduce_loss

FRAMES, GRID, DIM = 5, (2, 2), 16  # frames of a clip; rows and columns of a frame's tokens; channels
TOKENS, RATE = GRID[0] * GRID[1], 0.1


def make_model():
    torch.manual_seed(0)  # the same weights on every rank
    return nn.ModuleList(BidirectionalGDN(dim=DIM, heads=2) for _ in range(2)).double()


def clip_of(replica):
    generator = torch.Generator().manual_seed(replica)
    return torch.randn(1, FRAMES * TOKENS, DIM, generator=generator, dtype=torch.float64)


def mean_square(model, x):
    for block in model:
        x = x + block(x, (x.shape[1] // TOKENS, *GRID))
    return x.square().mean()


def train(model, loss_of):
    """Make two steps; return the loss of each. The second update shows in the weights alone."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rank_of_four(rank, folder):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # outputs of Linear are views; none is written to
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4, timeout=limit)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    context = CPContext(mesh=mesh, mesh_axis="cp")
    partition = FramePartition.even(FRAMES, context.size)  # 3 frames and 2

    model = apply_context_parallel(make_model(), context, partition)
    every = init_device_mesh("cpu", (4,))
    for block in model:
        fully_shard(block, mesh=every)  # parameters over all four ranks

    replica = mesh.get_local_rank("dp")
    clip = clip_of(replica).unflatten(1, (FRAMES, TOKENS))
    own = partition.split(clip, context.rank, 1).flatten(1, 2)  # this rank's frames of its replica's clip
    losses = train(model, lambda: reduce_loss(mean_square(model, own), context, n_local=own.shape[1]))
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    torch.save((replica, losses, weights), f"{folder}/{rank}")  # a loss is the mean over the clip, equal on both ranks
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_of_four, args=(folder,), nprocs=4, start_method="fork")
        ranks = [torch.load(f"{folder}/{rank}") for rank in range(4)]
    mean = torch.tensor([losses for _, losses, _ in ranks], dtype=torch.float64).mean(0)

    model = make_model()
    alone = train(model, lambda: sum(mean_square(model, clip_of(replica)) for replica in range(2)) / 2)
    print("loss per step, four ranks: ", [f"{value:.6f}" for value in mean.tolist()])
    print("loss per step, one process:", [f"{value:.6f}" for value in alone])
    difference = max(
        (found - weight).abs().max() for *_, weights in ranks for found, weight in zip(weights, model.parameters())
    )
    update = max(RATE * weight.grad.abs().max() for weight in model.parameters())
    print(
        f"largest difference of a weight on any rank: {difference:.1e}, largest update of the last step: {update:.1e}"
    )
    assert torch.allclose(mean, torch.tensor(alone, dtype=torch.float64), rtol=1e-12, atol=0)
    assert difference < 1e-12 * update < 1e-12
