"""Training a deep camera model: sharded parameters, context parallelism and checkpoints at once, on four processes."""

from __future__ import annotations

import pytest
import torch
from model_cases import camera_clip, error, randomized
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from gdn_cp import CPContext, FramePartition, keep_exchanges
from gdn_models import (
    CameraBidirectionalGDN,
    CameraChunkCausalGDN,
    CameraFrameGDN,
    all_reduce_gradients,
    apply_context_parallel,
    ray_transforms,
    reduce_loss,
)

C, ROWS, COLUMNS, STARTS = 16, 2, 1, (1, 4)
S = ROWS * COLUMNS
CLASSES = (CameraFrameGDN, CameraBidirectionalGDN, CameraChunkCausalGDN, CameraBidirectionalGDN)

pytestmark = [
    pytest.mark.ranks,
    # the output of any Linear on the CPU is a view; nothing here writes into one
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]


class Layer(nn.Module):
    """A residual block, checkpointed or not: what FSDP2 shards, so that running again finds the parameters there."""

    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.block = cls(dim=C, heads=2, conv_qv=True)
        self.checkpoint: dict | None = None

    def forward(self, x: Tensor, *seen: Tensor) -> Tensor:
        if self.checkpoint is None:
            return self.mix(x, *seen)
        return checkpoint(self.mix, x, *seen, use_reentrant=False, **self.checkpoint)

    def mix(self, x: Tensor, *seen: Tensor) -> Tensor:
        keywords = {"chunk_starts": STARTS} if self.block.has_chunks else {}
        return x + self.block(self.norm(x), (x.shape[1] // S, ROWS, COLUMNS), *seen, **keywords)


class Model(nn.Module):
    """Four blocks of all classes, which share the rays of one camera."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(C, C)
        self.layers = nn.ModuleList(map(Layer, CLASSES))

    def forward(self, x: Tensor, camera: Tensor) -> Tensor:
        rays = ray_transforms(camera, (x.shape[1] // S, ROWS, COLUMNS))
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, rays)
        return x


def make_model(dtype: torch.dtype) -> Model:
    """Return the model with random weights, the same on every process."""
    torch.manual_seed(3)
    return randomized(Model()).to(dtype)


def sample(replica: int, frames: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return input and target ``[1, F, S*C]`` and the camera ``[1, F, 20]`` of one sample."""
    generator = torch.Generator().manual_seed(replica)
    x, target = (torch.randn(1, frames, S * C, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(dtype), target.to(dtype), camera_clip(1, frames, seed=replica).to(dtype)


def token_losses(model: nn.Module, x: Tensor, target: Tensor, camera: Tensor) -> Tensor:
    y, target = (part.reshape(1, x.shape[1] * S, C) for part in (x, target))
    return (model(y, camera) - target).square().mean(-1)


def on_one_process(frames: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradient of the mean over two samples of the mean over their tokens."""
    model = make_model(dtype)
    (sum(token_losses(model, *sample(replica, frames, dtype)).mean() for replica in range(2)) / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("over", "counts", "options"),
    [
        ("dp and cp", (4, 3), {}),
        ("dp", (2, 5), {}),
        ("dp", (7, 0), {}),
        ("dp and cp", (3, 4), {"context_fn": keep_exchanges}),
    ],
    ids=["joint", "replicas", "empty-shard", "exchanges-kept"],
)
def test_sharded_checkpointed_camera_model_on_a_mesh_equals_one_process(
    over: str, counts: tuple[int, ...], options: dict
) -> None:
    """FC-D11, FC-D14: two samples, each on two ranks with other numbers of frames; every parameter by its name."""
    frames = sum(counts)
    expected, narrow = on_one_process(frames, torch.float64), on_one_process(frames, torch.float32)

    def worker(rank: int) -> dict[str, Tensor]:
        mesh, partition = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), FramePartition(counts)
        context = CPContext(mesh=mesh, mesh_axis="cp")
        model = apply_context_parallel(make_model(torch.float64), context, partition)
        shards = mesh["dp"] if over == "dp" else init_device_mesh("cpu", (4,))
        for layer in model.layers:
            layer.checkpoint = options
            fully_shard(layer, mesh=shards)
        fully_shard(model, mesh=shards)
        whole = sample(mesh.get_local_rank("dp"), frames, torch.float64)
        losses = token_losses(model, *(partition.split(part, context.rank, 1) for part in whole))
        if over == "dp":
            (losses.sum() / (frames * S)).backward()
            all_reduce_gradients(model, context)
        else:
            reduce_loss(losses.mean(), context, losses.numel()).backward()
        return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}

    # twice what fp32 rounds away on one process, 2**29 times less in fp64; of the worst parameter, as others are lucky
    tolerance = 2 * 2**-29 * max(error(narrow[name], value) for name, value in expected.items())
    assert tolerance < 1e-12
    for rank, found in enumerate(run_ranks(4, worker)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value.any(), name
            assert error(found[name], value) <= tolerance, f"rank {rank}, {name}: {error(found[name], value):.1e}"
