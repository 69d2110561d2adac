"""The published construction of the reverse direction, made of published functions, against our own operations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from published import DIMS, PER_TOKEN, RESULTS, Case, S
from ranks import run_ranks
from torch import Tensor

from gdn_cp import (
    CPContext,
    cp_frame_gdn_numerator,
    cp_frame_gdn_raw,
    cp_fused_cam_gdn_num_autograd,
    cp_fused_gdn_chunkwise_raw_autograd,
    cp_halo_exchange,
)
from gdn_cp.fused_steps import half_tables

F = 2  # frames of each rank


def frames(name: str, x: Tensor) -> Tensor:
    """Frames on their own dim, where a tensor holds tokens."""
    return x.unflatten(DIMS[name], (-1, S)) if name in PER_TOKEN else x


def flipped(name: str, x: Tensor, first: int) -> Tensor:
    """Frames ``first ...`` from last to first, as the function takes them."""
    dim = DIMS[name]
    x = frames(name, x).narrow(dim, first, F).flip(dim)
    return x.flatten(dim, dim + 1) if name in PER_TOKEN else x


def followed(name: str, x: Tensor, group: Any) -> Tensor:
    """This rank's frames and the one after them: zeros behind the clip, with decay 1."""
    dim = DIMS[name]
    found = cp_halo_exchange(frames(name, x), 0, 1, dim, group)
    if name == "decay" and dist.get_rank(group) == dist.get_world_size(group) - 1:
        found = found + torch.tensor([0.0] * F + [1.0], dtype=x.dtype)
    return found.flatten(dim, dim + 1) if name in PER_TOKEN else found


def construction(case: Case, leaves: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
    """Flip queries; flip keys, values and gates behind a frame of the next rank; scan from the last rank; flip back."""
    later = {n: flipped(n, followed(n, x, group), 1) for n, x in leaves.items() if n in DIMS}
    query = {n: flipped(n, x, 0) for n, x in leaves.items() if n in DIMS}
    common = dict(F=F, S=S, group=group, reverse_rank_order=True)
    if case.camera:
        out, _ = cp_fused_cam_gdn_num_autograd(
            query["q"], later["k"], later["v"], later["beta"], later["decay"], **common
        )
        results = {"out": out}
    else:
        raw = cp_fused_gdn_chunkwise_raw_autograd(
            torch.cat((query["qkv"][:, :, :1], later["qkv"][:, :, 1:]), 2), later["beta"], later["decay"],
            leaves["q_norm_weight"], leaves["k_norm_weight"], later["rope_cos"], later["rope_sin"], k_scale=0.6,
            dot_precision=2, rope_cos_q=query["rope_cos"], rope_sin_q=query["rope_sin"], **common,
        )  # fmt: skip
        results = {"num": raw.num, "den": raw.den}
    dims = {n: RESULTS[n] for n in results}
    return {n: x.unflatten(dims[n], (F, S)).flip(dims[n]).flatten(dims[n], dims[n] + 1) for n, x in results.items()}


def ours(case: Case, leaves: dict[str, Tensor], context: CPContext) -> dict[str, Tensor]:
    """The same without flipping or shifting anything."""
    gates = leaves["beta"], leaves["decay"]
    common: dict[str, Any] = dict(context=context, direction="reverse")
    if case.camera:
        q, k, v = (leaves[n].permute(0, 3, 1, 2) for n in ("q", "k", "v"))
        return {"out": cp_frame_gdn_numerator(q, k, v, *gates, **common).numerator.permute(0, 2, 3, 1)}
    result = cp_frame_gdn_raw(
        leaves["qkv"], *gates, rope=half_tables(leaves["rope_cos"], leaves["rope_sin"]),
        q_norm_weight=leaves["q_norm_weight"], k_norm_weight=leaves["k_norm_weight"], k_scale=0.6, **common,
    )  # fmt: skip
    return {"num": result.numerator, "den": result.denominator}


@pytest.mark.ranks
@pytest.mark.parametrize("camera", [False, True])
def test_published_construction_is_our_reverse_direction(camera):
    """Values and every gradient in fp64: per rank, summed for weights, as keys of a halo are normalised elsewhere."""
    case = dataclasses.replace(Case((F, F, F)), camera=camera)

    def worker(rank: int):
        group = dist.group.WORLD
        leaves = {n: case.cut(n, x, rank).clone() for n, x in case.tensors().items()}
        wanted = {n: x.requires_grad_() for n, x in leaves.items() if not n.startswith("rope")}
        pair = construction(case, leaves, group), ours(case, leaves, CPContext(group))
        found = []
        for results in pair:
            grads = torch.autograd.grad(case.rank_loss(rank, results), list(wanted.values()))
            found.append({n: x.detach() for n, x in results.items()} | dict(zip(wanted, grads, strict=True)))
        return found

    ranks = run_ranks(3, worker)
    shared = ("q_norm_weight", "k_norm_weight")
    pairs = [(n, found[n], y) for found, expected in ranks for n, y in expected.items() if n not in shared]
    for n in shared if not camera else ():
        pairs.append((n, *(torch.stack([rank[i][n] for rank in ranks]).sum(0) for i in (0, 1))))
    for name, x, y in pairs:
        assert torch.allclose(x, y, rtol=0, atol=1e-10 * float(y.abs().max())), name
        assert y.any()
