"""Two data-parallel replicas of two context-parallel ranks each, sharded by FSDP2: four processes on the CPU.

Run it as it is, it starts its own processes:  python fsdp_and_context_parallel.py
"""

import datetime
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gdn_cp import CPContext, FramePartition
from gdn_models import BidirectionalGDN, apply_context_parallel, reduce_loss

FRAMES, GRID, DIM = 5, (2, 2), 16  # frames of a clip; rows and columns of a frame's tokens; channels
TOKENS = GRID[0] * GRID[1]


def make_model():
    torch.manual_seed(0)  # the same weights on every rank
    return nn.ModuleList(BidirectionalGDN(dim=DIM, heads=2) for _ in range(2))


def clip_of(replica):
    return torch.randn(1, FRAMES * TOKENS, DIM, generator=torch.Generator().manual_seed(replica))


def loss_of(model, x, target):
    y = x
    for block in model:
        y = y + block(y, (x.shape[1] // TOKENS, *GRID))
    return (y - target).square().mean()


def train(rank, folder):
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    clip = clip_of(mesh.get_local_rank("dp")).unflatten(1, (FRAMES, TOKENS))
    own = partition.split(clip, context.rank, 1).flatten(1, 2)  # this rank's frames of its replica's clip
    losses = []
    for _ in range(2):
        loss = reduce_loss(loss_of(model, own, torch.zeros_like(own)), context, n_local=own.shape[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # the mean over the clip, equal on both of its ranks
    if context.rank == 0:
        torch.save(losses, f"{folder}/{mesh.get_local_rank('dp')}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(folder,), nprocs=4)
        ranks = torch.tensor([torch.load(f"{folder}/{replica}") for replica in range(2)]).mean(0)

    model, alone = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = sum(loss_of(model, clip_of(replica), torch.zeros(())) for replica in range(2)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        alone.append(loss.item())
    print("loss per step, four ranks: ", [f"{value:.6f}" for value in ranks.tolist()])
    print("loss per step, one process:", [f"{value:.6f}" for value in alone])
    assert torch.allclose(ranks, torch.tensor(alone), rtol=1e-5)
