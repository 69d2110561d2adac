"""A clip, its one-device result with every gradient, and the shards of it: what ranks and simulation are held to."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_cp import CPContext, FramePartition, cp_frame_gdn, cp_frame_gdn_numerator, cp_frame_gdn_raw
from gdn_kernels import FrameState, RotaryTables, frame_gdn, frame_gdn_numerator, frame_gdn_raw, rotary_tables

B, S, H, D = 2, 3, 4, 6
PER_FRAME = {"qkv": 1, "q": 1, "k": 1, "v": 1, "beta": 2, "decay": 2}  # dim that holds frames or their tokens
OPS = {"output": frame_gdn, "raw": frame_gdn_raw, "numerator": frame_gdn_numerator}
CP_OPS = {"output": cp_frame_gdn, "raw": cp_frame_gdn_raw, "numerator": cp_frame_gdn_numerator}


@dataclasses.dataclass(frozen=True)
class Clip:
    """One call on ``frames`` frames. ``kind``: output, raw or numerator."""

    frames: int = 7
    kind: str = "output"
    direction: str = "bidirectional"
    starts: tuple[int, ...] | None = None
    masked: bool = False
    initial: bool = True
    final: bool = True
    dtype: torch.dtype = torch.float64
    loss_ranks: tuple[int, ...] | None = None  # None: all
    final_loss_ranks: tuple[int, ...] | None = None

    @property
    def has_state(self) -> bool:
        return self.direction != "reverse"

    def tensors(self) -> dict[str, Tensor]:
        """Return the leaves of the whole clip; gates spread over their range, the state is not symmetric."""
        generator = torch.Generator().manual_seed(self.frames)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        n = self.frames * S
        leaves = {
            "beta": torch.sigmoid(normal(B, H, self.frames, S)),
            "decay": torch.sigmoid(normal(B, H, self.frames) + 1),
        }
        if self.kind == "numerator":
            leaves.update({name: 0.4 * normal(B, n, H, D) for name in ("q", "k", "v")})
        else:
            leaves["qkv"] = normal(B, n, 3, H, D)
            leaves["q_norm_weight"], leaves["k_norm_weight"] = 1 + 0.3 * normal(H * D), 1 + 0.3 * normal(H * D)
        if self.initial and self.has_state:
            leaves["kv"] = normal(B, H, D, D)
            if self.kind != "numerator":
                leaves["z"] = normal(B, H, D).abs() + 0.5
        return {name: x.to(self.dtype) for name, x in leaves.items()}

    def arguments(self, leaves: Mapping[str, Tensor], span: range) -> dict[str, Any]:
        """Return the arguments of the operation on the frames ``span``, as views of the leaves."""
        given = tensors_of(leaves, span, S)
        given |= {"direction": self.direction, "output_final_state": self.final and self.has_state}
        if self.kind != "numerator":
            tables = rotary_tables((self.frames, S, 1), D)
            given |= {"k_scale": 0.3, "rope": RotaryTables(*(t[span.start * S : span.stop * S] for t in tables))}
        if self.kind == "output":
            given["eps"] = 0.5  # keeps the division away from the zeros of the denominator
        if self.masked:
            mask = torch.tensor([[1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1, 0]]).bool()
            given["frame_valid"] = mask[:, span.start : span.stop]
        return given

    def upstream(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the gradient that arrives at one result of the whole clip."""
        generator = torch.Generator().manual_seed(len(name))
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(self.dtype)


def tensors_of(leaves: Mapping[str, Tensor], span: range, spatial: int) -> dict[str, Any]:
    """Return the tensors of a call on the frames ``span`` of ``spatial`` tokens, as views of the leaves."""
    given: dict[str, Any] = {}
    for name, x in leaves.items():
        if name in PER_FRAME:
            scale = spatial if PER_FRAME[name] == 1 else 1
            given[name] = x.narrow(PER_FRAME[name], span.start * scale, len(span) * scale)
        elif name not in ("kv", "z"):
            given[name] = x
    return given | state_of(leaves)


def state_of(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the initial state, as an argument, of leaves that hold one."""
    if "kv" not in leaves:
        return {}
    return {"initial_state": FrameState(leaves["kv"], leaves["z"]) if "z" in leaves else leaves["kv"]}


def results_of(result: Any) -> dict[str, Tensor]:
    """Return the tensors of a result by name."""
    named = {name: x for name, x in zip(result._fields, result, strict=True) if x is not None}
    state = named.pop("final_state", None)
    if isinstance(state, FrameState):
        named |= {"final_kv": state.kv, "final_z": state.z}
    elif state is not None:
        named["final_kv"] = state
    return named


def whole(clip: Clip, partition: FramePartition) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return results and gradients of the whole clip on one device, with the loss that the ranks share."""
    return _whole(clip, partition if clip.loss_ranks is not None else FramePartition.even(clip.frames, partition.size))


@functools.lru_cache(maxsize=64)
def _whole(clip: Clip, partition: FramePartition) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    leaves = {name: x.requires_grad_() for name, x in clip.tensors().items()}
    arguments = clip.arguments(leaves, range(clip.frames))
    results = results_of(OPS[clip.kind](chunk_starts=clip.starts, **arguments))
    loss = torch.zeros((), dtype=clip.dtype)
    for name, x in results.items():
        loss = loss + sum((part * up).sum() for _, part, up in losses(clip, partition, name, x))
    return {name: x.detach() for name, x in results.items()}, gradients(loss, leaves)


def losses(clip: Clip, partition: FramePartition, name: str, x: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Return (rank, its part of a whole result, what arrives there) for the ranks that have a loss on it."""
    up = clip.upstream(name, x.shape)
    if name.startswith("final"):
        ranks = range(partition.size) if clip.final_loss_ranks is None else clip.final_loss_ranks
        return [(rank, x, up * (rank + 1)) for rank in ranks]
    dim = 2 if name == "denominator" else 1
    ranks = range(partition.size) if clip.loss_ranks is None else clip.loss_ranks
    cut = [slice(partition.starts[rank] * S, partition.starts[rank + 1] * S) for rank in ranks]
    index = [(slice(None),) * dim + (span,) for span in cut]
    return [(rank, x[i], up[i]) for rank, i in zip(ranks, index, strict=True)]


def gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of every leaf, zeros where the loss does not reach it."""
    wanted = [x for x in leaves.values() if x.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    given = iter(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True))
    return {name: next(given) for name, x in leaves.items() if x.requires_grad}


def shard_leaves(clip: Clip, partition: FramePartition, rank: int) -> dict[str, Tensor]:
    """Return this rank's own leaves: its frames, and copies of what ranks share."""
    span = partition.span(rank)
    shard = Clip.arguments(dataclasses.replace(clip, masked=False), clip.tensors(), span)
    leaves = {name: x for name, x in shard.items() if isinstance(x, Tensor) and name != "initial_state"}
    state = shard.get("initial_state")
    if state is not None:
        leaves |= {"kv": state.kv, "z": state.z} if isinstance(state, FrameState) else {"kv": state}
    return {name: x.clone().requires_grad_() for name, x in leaves.items()}


def shard_arguments(clip: Clip, partition: FramePartition, rank: int, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of one rank, made of its own leaves."""
    given = clip.arguments(clip.tensors(), partition.span(rank))
    return given | {name: x for name, x in leaves.items() if name not in ("kv", "z")} | state_of(leaves)


def shard_loss(clip: Clip, partition: FramePartition, rank: int, results: Mapping[str, Tensor]) -> Tensor:
    """Return this rank's loss: its part of the sum that `whole` differentiates, tied to all its results."""
    loss = torch.zeros((), dtype=clip.dtype)
    for name, x in results.items():
        loss = loss + 0 * x.sum()
        if name.startswith("final"):
            if clip.final_loss_ranks is None or rank in clip.final_loss_ranks:
                loss = loss + (x * clip.upstream(name, x.shape) * (rank + 1)).sum()
        elif clip.loss_ranks is None or rank in clip.loss_ranks:
            dim = 2 if name == "denominator" else 1
            shape = list(x.shape)
            shape[dim] = clip.frames * S
            span = partition.span(rank)
            up = clip.upstream(name, shape).narrow(dim, span.start * S, len(span) * S)
            loss = loss + (x * up).sum()
    return loss


def compare(
    clip: Clip,
    partition: FramePartition,
    ranks: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]],
    tolerance: float,
    gradient_tolerance: float | None = None,
) -> None:
    """Hold (results, gradients) of every rank to the one-device run: per rank for frames, summed for what is shared."""
    results, expected = whole(clip, partition)
    bound = tolerance if gradient_tolerance is None else gradient_tolerance
    for rank, (found, grads) in enumerate(ranks):
        span = partition.span(rank)
        for name, x in results.items():
            if not name.startswith("final"):
                x = x.narrow(2 if name == "denominator" else 1, span.start * S, len(span) * S)
            check(f"{name} of rank {rank}", found[name], x, results[name], tolerance)
        for name, x in grads.items():
            if name in PER_FRAME:
                scale = S if PER_FRAME[name] == 1 else 1
                own = expected[name].narrow(PER_FRAME[name], span.start * scale, len(span) * scale)
                check(f"gradient of {name} on rank {rank}", x, own, expected[name], bound)
            if name in ("kv", "z") and rank > 0:
                assert not x.any(), f"gradient of {name} on rank {rank} must be exactly 0"
    for name in expected:
        if name not in PER_FRAME:
            total = torch.stack([grads[name] for _, grads in ranks if name in grads]).sum(0)
            check(f"gradient of {name}, summed", total, expected[name], expected[name], bound)


def check(name: str, found: Tensor, expected: Tensor, scale: Tensor, tolerance: float) -> None:
    """Fail unless the largest difference is within ``tolerance`` of the largest entry of ``scale``."""
    assert found.shape == expected.shape, f"{name}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return
    difference = (found.detach().double() - expected.detach().double()).abs().max()
    size = scale.detach().double().abs().max().clamp(min=1e-300)
    assert float(difference / size) <= tolerance, f"{name}: relative error {float(difference / size):.2e} > {tolerance}"


def on_rank(clip: Clip, partition: FramePartition, context: CPContext) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return results and gradients of this rank's call."""
    leaves = shard_leaves(clip, partition, context.rank)
    arguments = shard_arguments(clip, partition, context.rank, leaves)
    result = CP_OPS[clip.kind](context=context, partition=partition, chunk_starts=clip.starts, **arguments)
    results = results_of(result)
    grads = gradients(shard_loss(clip, partition, context.rank, results), leaves)
    return {name: x.detach() for name, x in results.items()}, grads
