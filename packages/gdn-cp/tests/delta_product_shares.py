"""Shares of a gated delta product over ranks, run one after the other by hand, through a backend's protocol."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from gdn_cp import TokenPartition
from gdn_cp.chunkwise import CPBackwardPackedSummary, CPForwardPackedSummary
from gdn_cp.delta_product.common import GDPInputs
from gdn_kernels.reference.delta_product import delta_product_reference

PER_STEP = ("k", "v", "beta")
SCALE = 0.25


@dataclasses.dataclass(frozen=True)
class Share:
    """Tokens per rank; lengths of packed sequences, or None for batch rows; steps per token; heads and widths."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...] | None = None
    steps: int = 2
    gated: bool = True
    heads: tuple[int, int] = (2, 4)
    widths: tuple[int, int] = (4, 3)
    batch: int = 2
    states: bool = True
    strength: float = 2.0  # bound of beta

    @property
    def cu(self) -> tuple[int, ...] | None:
        return None if self.lengths is None else (0, *itertools.accumulate(self.lengths))

    @property
    def rows(self) -> tuple[int, int]:
        """Batch rows, and sequences."""
        return (self.batch, self.batch) if self.lengths is None else (1, len(self.lengths))

    def leaves(self, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
        """Return inputs of the whole stream; decays and states in fp32 for 16 bits."""
        generator, (batch, sequences), tokens = torch.Generator().manual_seed(5), self.rows, sum(self.counts)
        (heads, value_heads), (width, value_width) = self.heads, self.widths
        wide = torch.promote_types(dtype, torch.float32)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        found = {
            "q": normal(batch, tokens, heads, width).to(dtype),
            "k": torch.nn.functional.normalize(normal(batch, tokens * self.steps, heads, width), dim=-1).to(dtype),
            "v": normal(batch, tokens * self.steps, value_heads, value_width).to(dtype),
            "beta": (self.strength * torch.sigmoid(normal(batch, tokens * self.steps, value_heads))).to(dtype),
        }
        if self.gated:
            found["g"] = (-0.1 * normal(batch, tokens, value_heads).abs()).to(wide)
        if self.states:
            found["initial_state"] = normal(sequences, value_heads, width, value_width).to(wide)
        return {name: x.to(device) for name, x in found.items()}

    def weights(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """Return the gradients that arrive at the output and at the final states."""
        generator, (batch, sequences), value_heads = torch.Generator().manual_seed(6), self.rows, self.heads[1]
        shapes = (batch, sum(self.counts), value_heads, self.widths[1]), (sequences, value_heads, *self.widths)
        output, final = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        for i, length in enumerate(self.lengths or ()):
            final[i] *= length > 0  # a sequence without tokens has no fragment, and so no final state
        wide = torch.promote_types(dtype, torch.float32)
        return output.to(device, dtype), self.states * final.to(device, wide)

    def exact(self, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
        """Return output, final states and gradients by the plain recurrence and autograd, in fp64, on these inputs."""
        leaves = {name: x.double().requires_grad_() for name, x in self.leaves(dtype, device).items()}
        output, final = delta_product_reference(
            **{"g": None, **leaves}, num_householder=self.steps, scale=SCALE, output_final_state=True,
            cu_seqlens=self.cu,
        )  # fmt: skip
        arriving = [x.double() for x in self.weights(dtype, device)]
        loss = (output * arriving[0]).sum() + (final * arriving[1]).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        held = torch.tensor([length > 0 for length in self.lengths or (1,) * self.batch], device=device)
        final = final * held[:, None, None, None]
        found = {"output": output.detach(), "final_state": final.detach()}
        return found | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}

    def place(self, rank: int, device: str) -> dict[str, Any]:
        """Return cu_seqlens, bounds, start, stop, sequence of each fragment, and which fragments begin and end here."""
        size = len(self.counts)
        if self.cu is None:
            rows = list(range(self.batch))
            return {
                "cu_seqlens": None, "bounds": None, "start": 0, "stop": size, "sequences": rows,
                "begin": rows if rank == 0 else [], "end": rows if rank == size - 1 else [],
            }  # fmt: skip
        metadata = TokenPartition(self.counts).packed(self.cu, rank, device)
        start, stop = metadata.preceding_rank_start, metadata.following_rank_stop
        fragments = list(range(len(metadata.fragment_sequences)))
        return {
            "cu_seqlens": metadata.local_cu_seqlens, "bounds": metadata.bounds, "start": start, "stop": stop,
            "sequences": metadata.fragment_sequences, "begin": fragments[1 if start < rank else 0 :],
            "end": fragments[:-1] if stop > rank + 1 else fragments,
        }  # fmt: skip


def cut(share: Share, name: str, x: Tensor, rank: int) -> Tensor:
    """Return a rank's part of a stream, contiguous."""
    span, steps = TokenPartition(share.counts).span(rank), share.steps if name in PER_STEP else 1
    return x[:, span.start * steps : span.stop * steps].contiguous()


def unread(summary: Tensor, needed: bool) -> Tensor:
    return summary if needed else torch.full_like(summary, float("nan"))


def by_hand(share: Share, backend: Any, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Return what `Share.exact` returns, through both passes of a backend; summaries that are not needed are NaN."""
    leaves, (doutput, dfinal), size = share.leaves(dtype, device), share.weights(dtype, device), len(share.counts)
    places = [share.place(rank, device) for rank in range(size)]
    prepared = []
    for rank, place in enumerate(places):
        parts = {name: cut(share, name, x, rank) for name, x in leaves.items() if name != "initial_state"}
        states = None
        if share.states:
            states = leaves["initial_state"].new_zeros(len(place["sequences"]), *leaves["initial_state"].shape[1:])
            for fragment in place["begin"]:
                states[fragment] = leaves["initial_state"][place["sequences"][fragment]]
        empty = not share.counts[rank]
        inputs = GDPInputs(
            parts["q"], parts["k"], parts["v"], parts.get("g"), parts["beta"], place["cu_seqlens"], share.steps, SCALE,
            states, share.states, empty or place["stop"] > rank + 1, empty or place["start"] < rank, place["bounds"],
        )  # fmt: skip
        prepared.append((inputs, *backend.cp_forward_prepare(inputs)))
    gathered = torch.stack([unread(s.packed, i.forward_summary_needed) for i, s, _ in prepared])
    outputs, finals, saved = [], torch.zeros_like(dfinal), []
    for rank, (_, _, local) in enumerate(prepared):
        preceding = CPForwardPackedSummary(gathered[places[rank]["start"] : rank])
        found, context = backend.cp_forward_apply(local, preceding)
        if share.states:
            found, final = found
            for fragment in places[rank]["end"]:
                finals[places[rank]["sequences"][fragment]] = final[fragment]
        outputs.append(found)
        saved.append(context)
    returned = []
    for rank, place in enumerate(places):
        arriving: Any = cut(share, "output", doutput, rank)
        if share.states:
            rows = dfinal.new_zeros(len(place["sequences"]), *dfinal.shape[1:])
            for fragment in place["end"]:
                rows[fragment] = dfinal[place["sequences"][fragment]]
            arriving = (arriving, rows)
        returned.append(backend.cp_backward_prepare(arriving, saved[rank]))
    gathered = torch.stack(
        [unread(s.packed, prepared[rank][0].backward_summary_needed) for rank, (s, _) in enumerate(returned)]
    )
    grads = []
    for rank, (_, context) in enumerate(returned):
        following = CPBackwardPackedSummary(gathered[rank + 1 : places[rank]["stop"]])
        grads.append(backend.cp_backward_apply(context, following))
    names = ("q", "k", "v", "g", "beta")
    found = {"output": torch.cat(outputs, 1)}
    for i, name in enumerate(names):
        if name in leaves:
            found[f"d{name}"] = torch.cat([own[i] for own in grads], 1)
    if share.states:
        found["final_state"] = finals
        found["dinitial_state"] = torch.zeros_like(leaves["initial_state"])
        for own, place in zip(grads, places, strict=True):
            for fragment in place["begin"]:
                found["dinitial_state"][place["sequences"][fragment]] += own[5][fragment]
    return found


def error(found: Tensor, exact: Tensor) -> float:
    """Return the relative Frobenius error."""
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))
