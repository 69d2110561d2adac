"""The published functions transcribed eagerly, one frame after another, and clips to hold ours to them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_cp import CpFusedGdnRawResult, cp_fused_cam_gdn_num_autograd, cp_fused_gdn_chunkwise_raw_autograd
from gdn_cp.fused_pass import FusedCall, FusedResult, fused_plan, run_fused
from gdn_cp.fused_steps import half_tables
from gdn_kernels.frame_gdn.op import frame_gdn_arguments, numerator_arguments

B, H, D, S = 2, 3, 4, 5
DIMS = {"qkv": 1, "q": 3, "k": 3, "v": 3, "beta": 2, "decay": 2, "rope_cos": 0, "rope_sin": 0, "rope_cos_q": 0,
        "rope_sin_q": 0}  # fmt: skip
PER_TOKEN = ("qkv", "q", "k", "v", "rope_cos", "rope_sin", "rope_cos_q", "rope_sin_q")
RESULTS = {"num": 1, "den": 2, "out": 3}  # dim of tokens; terminal states have none


@dataclasses.dataclass(frozen=True)
class Case:
    """One call over ranks that hold ``counts`` frames each; frames are given in the order of states."""

    counts: tuple[int, ...]
    camera: bool = False
    reverse: bool = False
    truncate: int | None = None
    weights: str = "qk"  # which norm weights are given
    query_tables: bool = False
    beta_dims: int = 4
    use_checkpoint: bool | None = None
    unused: tuple[str, ...] = ()  # results that no loss uses

    @property
    def frames(self) -> int:
        return sum(self.counts)

    def tensors(self) -> dict[str, Tensor]:
        """The arguments of the whole clip, fp64."""
        generator = torch.Generator().manual_seed(self.frames)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        n = self.frames * S
        gate = (B, H, self.frames) if self.beta_dims == 3 else (B, H, self.frames, S)
        given = {"beta": torch.sigmoid(normal(*gate)), "decay": torch.sigmoid(normal(B, H, self.frames) + 1)}
        if self.camera:
            return given | {name: 0.5 * normal(B, H, D, n) for name in ("q", "k", "v")}
        given["qkv"] = normal(B, n, 3, H, D)
        for name in ("q", "k"):
            if name in self.weights:
                given[f"{name}_norm_weight"] = 1 + 0.3 * normal(H * D)
        for end in ("", "_q") if self.query_tables else ("",):
            angle = normal(n, D // 2)
            given[f"rope_cos{end}"] = angle.cos().repeat_interleave(2, dim=1)
            given[f"rope_sin{end}"] = torch.stack((-angle.sin(), angle.sin()), dim=2).flatten(1)
        return given

    def leaves(self) -> dict[str, Tensor]:
        return {n: x if n.startswith("rope") else x.requires_grad_() for n, x in self.tensors().items()}

    def spans(self) -> list[range]:
        """Frames of each rank."""
        order = self.counts[::-1] if self.reverse else self.counts
        found = [range(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(order)])]
        return found[::-1] if self.reverse else found

    def cut(self, name: str, x: Tensor, rank: int) -> Tensor:
        """Return the rank's part of an argument; all of it for what ranks share."""
        span, step = self.spans()[rank], S if name in PER_TOKEN else 1
        return x.narrow(DIMS[name], span.start * step, len(span) * step) if name in DIMS else x

    def upstream(self, name: str, shape: Sequence[int], rank: int = 0) -> Tensor:
        """The gradient that arrives at a result, strided; at terminal states another one on every rank."""
        if name in self.unused:
            return torch.zeros(tuple(shape), dtype=torch.float64)
        generator = torch.Generator().manual_seed(len(name) + 100 * rank)
        up = torch.randn((*reversed(shape), 2), generator=generator, dtype=torch.float64)
        return up[..., 0].permute(*range(len(shape))[::-1])

    def rank_loss(self, rank: int, results: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of the loss; results that are not used stay out of it."""
        loss = torch.zeros((), dtype=torch.float64)
        for name, x in results.items():
            if name in self.unused:
                continue
            up = self.upstream(name, x.shape, rank)
            if name in RESULTS:
                span, shape = self.spans()[rank], list(x.shape)
                shape[RESULTS[name]] = self.frames * S
                up = self.upstream(name, shape).narrow(RESULTS[name], span.start * S, len(span) * S)
            loss = loss + (x * up).sum()
        return loss

    def whole(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return results of the whole clip, and gradients of the sum of the ranks' losses."""
        leaves = self.leaves()
        results = (eager_camera if self.camera else eager_main)(self, leaves)
        loss = torch.zeros((), dtype=torch.float64)
        for name, x in results.items():
            for rank in range(1 if name in RESULTS else len(self.counts)):
                loss = loss + (x * self.upstream(name, x.shape, rank)).sum()
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return {n: x.detach() for n, x in results.items()}, {
            name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), grads, strict=True)
        }

    def compare(
        self, ranks: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor | None]]], bound: float = 1e-10
    ) -> None:
        """Hold (results, gradients) of every rank to the transcription: per rank, summed for what ranks share."""
        results, expected = self.whole()
        for rank, (found, grads) in enumerate(ranks):
            span = self.spans()[rank]
            assert set(found) == set(results)
            for name, x in found.items():
                own = results[name]
                if name in RESULTS:
                    own = own.narrow(RESULTS[name], span.start * S, len(span) * S)
                close(f"{name} of rank {rank}", x, own, results[name], bound)
            for name, g in grads.items():
                if name in DIMS:
                    own = self.cut(name, expected[name], rank)
                    close(f"gradient of {name} on rank {rank}", g, own, expected[name], bound)
        for name in set(expected) - set(DIMS):
            total = torch.stack([grads[name] for _, grads in ranks]).sum(0)
            close(f"gradient of {name}, summed", total, expected[name], expected[name], bound)


def close(name: str, found: Tensor | None, expected: Tensor, scale: Tensor, bound: float) -> None:
    assert found is not None, f"{name} is missing"
    assert found.shape == expected.shape, f"{name}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if expected.numel():
        error = float((found.detach().double() - expected).abs().max())
        assert error <= bound * float(scale.abs().max()), f"{name}: error {error:.2e}"


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``y[d] = x[d] cos[d] + x[d ^ 1] sin[d]`` for ``x [B, N, H, D]`` and tables ``[N, D]``."""
    partner = [d ^ 1 for d in range(x.shape[-1])]
    return x * cos[:, None] + x[..., partner] * sin[:, None]


def eager_main(case: Case, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norm over all channels, ReLU, scale, rotation, then the left-form recurrence of both streams."""
    q, k, v = given["qkv"].unbind(2)
    if case.weights:
        ones = torch.ones(H * D, dtype=q.dtype)
        q, k = (
            x / (x.pow(2).sum((2, 3), keepdim=True) / (H * D) + 1e-5).sqrt()
            * given.get(name, ones).view(H, D)
            for x, name in ((q, "q_norm_weight"), (k, "k_norm_weight"))
        )  # fmt: skip
    q, k = q.clamp(min=0), 0.6 * k.clamp(min=0)
    kr = turned(k, given["rope_cos"], given["rope_sin"])
    end = "_q" if case.query_tables else ""
    qr = turned(q, given[f"rope_cos{end}"], given[f"rope_sin{end}"])
    kv, z = q.new_zeros(B, H, D, D), q.new_zeros(B, H, D)
    num, den = [], []
    for f in range(case.frames):
        tokens = slice(f * S, (f + 1) * S)
        if case.truncate is None or f < case.truncate:
            beta, decay = given["beta"][:, :, f], given["decay"][:, :, f]
            seen = torch.einsum("bshd,bhdv->bshv", kr[:, tokens], kv)
            written = torch.einsum("bshd,bhs,bshv->bhdv", kr[:, tokens], beta, seen)
            kv = decay[..., None, None] * (kv - written)
            kv = kv + torch.einsum("bshd,bhs,bshv->bhdv", kr[:, tokens], beta, v[:, tokens])
            seen = torch.einsum("bshd,bhd->bsh", k[:, tokens], z)
            written = torch.einsum("bshd,bhs,bsh->bhd", k[:, tokens], beta, seen)
            z = decay[..., None] * (z - written) + torch.einsum("bshd,bhs->bhd", k[:, tokens], beta)
        num.append(torch.einsum("bshd,bhdv->bshv", qr[:, tokens], kv))
        den.append(torch.einsum("bshd,bhd->bhs", q[:, tokens], z))
    results = {"num": torch.cat(num, 1), "den": torch.cat(den, 2)}
    if case.truncate is not None:
        results |= {
            "terminal_state_kv": kv.transpose(2, 3).reshape(B * H, D, D),
            "terminal_state_z": z.reshape(B * H, D),
        }
    return results


def eager_camera(case: Case, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The kv stream in the published right form: ``S = S @ W + U`` with value-first states."""
    q, k, v = (given[name].unflatten(3, (case.frames, S)) for name in ("q", "k", "v"))  # [B, H, D, F, S]
    beta = given["beta"] if case.beta_dims == 4 else given["beta"][..., None].expand(-1, -1, -1, S)
    state, out = q.new_zeros(B, H, D, D), []
    eye = torch.eye(D, dtype=q.dtype)
    for f in range(case.frames):
        if case.truncate is None or f < case.truncate:
            kb = k[:, :, :, f] * beta[:, :, None, f]
            W = given["decay"][:, :, f, None, None] * (eye - kb @ k[:, :, :, f].transpose(2, 3))
            state = state @ W + (v[:, :, :, f] * beta[:, :, None, f]) @ k[:, :, :, f].transpose(2, 3)
        out.append(state @ q[:, :, :, f])
    results = {"out": torch.cat(out, 3)}
    return results if case.truncate is None else results | {"terminal_state_kv": state.reshape(B * H, D, D)}


def call(case: Case, given: dict[str, Any], frames: int, group: Any, **options: Any) -> dict[str, Tensor]:
    """Call the published function of the case and return its results by name."""
    common = dict(F=frames, S=S, group=group, reverse_rank_order=case.reverse, truncate_to_active=case.truncate,
                  use_checkpoint=case.use_checkpoint) | options  # fmt: skip
    if case.camera:
        out, state = cp_fused_cam_gdn_num_autograd(
            *(given[name] for name in ("q", "k", "v", "beta", "decay")), **common
        )
        return {"out": out} if state is None else {"out": out, "terminal_state_kv": state}
    raw = cp_fused_gdn_chunkwise_raw_autograd(
        given["qkv"], given["beta"], given["decay"], given.get("q_norm_weight"), given.get("k_norm_weight"),
        given["rope_cos"], given["rope_sin"], rope_cos_q=given.get("rope_cos_q"), rope_sin_q=given.get("rope_sin_q"),
        **({"k_scale": 0.6, "dot_precision": 2} | common),
    )  # fmt: skip
    assert isinstance(raw, CpFusedGdnRawResult)
    names = ("num", "den", "terminal_state_kv", "terminal_state_z")
    return {name: getattr(raw, name) for name in names if getattr(raw, name) is not None}


def stack(buffers: list[Tensor], label: str) -> Tensor:
    return torch.stack(buffers)


def simulate(
    case: Case, ranks: list[dict[str, Tensor]], save_transitions: bool = True, impl: str = "torch"
) -> list[FusedResult]:
    """Run the pass of the case in this process, with one dict of published arguments per rank."""
    calls = []
    for rank, x in enumerate(ranks):
        common: dict[str, Any] = dict(direction="forward", chunk_starts=None, frame_valid=None, initial_state=None,
                                      output_final_state=False, precision="ieee", impl=impl)  # fmt: skip
        if case.camera:
            qkv = [x[name].permute(0, 3, 1, 2) for name in ("q", "k", "v")]
            inputs, options, _ = numerator_arguments(*qkv, x["beta"], x["decay"], **common)
        else:
            inputs, options, _ = frame_gdn_arguments(
                x["qkv"], x["beta"], x["decay"], rope=half_tables(x["rope_cos"], x["rope_sin"]),
                q_norm_weight=x.get("q_norm_weight"), k_norm_weight=x.get("k_norm_weight"), k_scale=0.6,
                norm_eps=1e-5, eps=0.0, divide=False, **common,
            )  # fmt: skip
        final = case.truncate is not None
        plan = fused_plan(inputs, options, (rank, len(ranks)), reverse=case.reverse, has_final=final,
                          save_transitions=save_transitions)  # fmt: skip
        calls.append(FusedCall(plan, inputs, options, recompute=True))
    return run_fused(calls, stack, torch.empty(0))


def named(case: Case, result: FusedResult) -> dict[str, Tensor]:
    """Return a result under its published names and conventions."""
    kv, z = result.final_kv, result.final_z
    names = {"out": result.numerator.permute(0, 2, 3, 1)} if case.camera else {"num": result.numerator}
    if result.denominator is not None:
        names["den"] = result.denominator
    if kv is not None:
        names["terminal_state_kv"] = kv.mT.flatten(0, 1)
    if z is not None:
        names["terminal_state_z"] = z.flatten(0, 1)
    return names
