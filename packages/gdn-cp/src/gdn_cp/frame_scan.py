"""The published cross-rank scan of given transitions.

Published conventions hold in the arguments and results of `cp_frame_gdn_scan` alone; what follows it is in the left
form, with z a state of one column. Transitions need not be symmetric, so a pass sends those of its direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_cp import affine
from gdn_cp.affine import AffineMap
from gdn_cp.collectives import ProcessGroup
from gdn_cp.context import CPContext, as_context
from gdn_cp.handshake import Terms, agree
from gdn_cp.scan_plan import Exchange, ScanPlan, active_frames, over_ranks
from gdn_kernels import checks
from gdn_kernels.once import once_differentiable

_OP = "cp_frame_gdn_scan"


class CpFrameGdnScanResult(NamedTuple):
    """States of a truncated scan; kv is value-first.

    ``S_kv_all [B*H, T_local, D, D]`` and ``S_z_all [B*H, T_local, D]`` are those of this rank's frames,
    ``terminal_state_kv [B*H, D, D]`` and ``terminal_state_z [B*H, D]``, equal on all ranks, those after global frame
    ``truncate_to_active - 1``.
    """

    S_kv_all: Tensor
    S_z_all: Tensor
    terminal_state_kv: Tensor
    terminal_state_z: Tensor


def cp_frame_gdn_scan(
    W_kv: Tensor,
    U_kv: Tensor,
    W_z: Tensor,
    U_z: Tensor,
    group: ProcessGroup | CPContext,
    reverse: bool = False,
    truncate_to_active: int | None = None,
) -> tuple[Tensor, Tensor] | CpFrameGdnScanResult:
    """Scan given transitions over the frames of all ranks, with the published arguments and conventions.

        S_t = S_{t-1} @ W_kv,t + U_kv,t          z_t = W_z,t @ z_{t-1} + U_z,t          from zero, over all ranks

    Args:
        W_kv: ``[B*H, T_local, D, D]``, any floating dtype and strides; need not be symmetric.
        U_kv: as ``W_kv``.
        W_z: as ``W_kv``.
        U_z: ``[B*H, T_local, D]``, in the dtype of ``W_kv``.
        group: a process group or a `CPContext`. Ranks may hold different ``T_local``, also 0.
        reverse: take the ranks from last to first. The frames of a rank are taken as they come: the caller has flipped
            them.
        truncate_to_active: K, counted over the frames of all ranks. Frames from K on change nothing: their states equal
            that of frame K - 1, and their own transitions get exact zeros as gradients. Every rank then needs the same
            ``T_local``.

    Returns:
        tuple[Tensor, Tensor] | CpFrameGdnScanResult: ``S_kv_all`` and ``S_z_all`` of this rank's frames; with
        ``truncate_to_active`` a result of four fields. In the dtype of ``W_kv``, computed in at least fp32.

    Raises:
        NotImplementedError: ``truncate_to_active`` with ``reverse``.
        ValueError: A shape, dtype or device is wrong; K is outside ``1 ... T_local * P``; ranks of a truncated scan
            have different ``T_local``. On every rank if on one.
        TypeError: ``group`` or another argument is of the wrong type.
        RuntimeError: Ranks disagree; an exchange did not complete.

    Communication: one all-gather per pass, of ``3 D^2 + D`` numbers per row of ``B*H`` forward and ``D^2 + D``
        backward, twice that with ``truncate_to_active``, fp32 (fp64 for fp64). None with one rank. The first call of a
        kind, and of a K with its T_local, is preceded by the comparison of arguments that `CPContext` describes.
    Every rank must call this: yes, and its backward, if some rank's input requires a gradient.
    Gradient: to all four inputs, of the sum of all ranks' losses; those that arrive at terminal states are summed over
        ranks. Once differentiable.
    Cost: two scans of ``T_local`` dependent products forward, four backward; products are made in fp64 and rounded
        once. No cumulative products. Saves its inputs and two states.

    Example:
        >>> W, U = 0.5 * torch.eye(4).expand(2, 3, 4, 4), torch.ones(2, 3, 4, 4)
        >>> S_kv, S_z = cp_frame_gdn_scan(W, U, W, U[..., 0], CPContext.single())
        >>> S_z[0, :, 0]
        tensor([1.0000, 1.5000, 1.7500])
    """
    context = as_context(group)

    def make() -> tuple[Terms, ScanPlan]:
        plan = make_scan_plan((W_kv, U_kv, W_z, U_z), context, reverse, truncate_to_active)
        return plan.terms((W_kv, U_kv, W_z, U_z), truncate_to_active, W_kv.shape[1]), plan

    device = W_kv.device if isinstance(W_kv, Tensor) else None
    plan, backward = (make()[1], False) if context.is_trivial else agree(_OP, context, device, make)
    tie = torch.empty(0, device=plan.device, requires_grad=backward)
    return run_scan([plan], over_ranks(context, _OP), tie, (W_kv, U_kv, W_z, U_z))[0]


def make_scan_plan(
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    context: CPContext,
    reverse: bool,
    truncate: int | None,
    place: tuple[int, int] | None = None,
) -> ScanPlan:
    """Check the arguments of `cp_frame_gdn_scan` and return this rank's plan; ``place`` overrides rank and size."""
    W_kv = given[0]
    checks.require_rank("W_kv", W_kv, "B*H, T_local, D, D")
    rows, frames, width = *W_kv.shape[:2], W_kv.shape[3]
    checks.require_dtype("W_kv", W_kv, checks.FLOATING)
    for name, x in zip(("W_kv", "U_kv", "W_z", "U_z"), given, strict=True):
        square = () if name == "U_z" else (width,)
        letters = "B*H, T_local, D, D" if square else "B*H, T_local, D"
        checks.require_shape(name, x, letters, (rows, frames, width, *square))
        checks.require_dtype(name, x, (W_kv.dtype,))
        checks.require_device(name, x, W_kv.device, "W_kv")
    rank, size = place or (context.rank, context.size)
    active = active_frames(truncate, reverse, frames, rank, size)
    dtype = torch.float64 if W_kv.dtype == torch.float64 else torch.float32
    return ScanPlan(size, rank, bool(reverse), ("kv", "z"), (rows,), width, dtype, W_kv.device,
                    truncate is not None, active, context.save_transitions)  # fmt: skip


def run_scan(
    plans: list[ScanPlan], exchange: Exchange, tie: Tensor, tensors: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor] | CpFrameGdnScanResult]:
    """Run the scan of the ranks of this process; ``tensors`` are the four of each, one rank after another.

    A ``tie`` that requires a gradient makes the backward exchange run whatever the tensors require.
    """
    found = _Scan.apply(plans, exchange, tie, *tensors)  # type: ignore[no-untyped-call]
    ranks = [found[4 * i : 4 * i + 4] for i in range(len(plans))]
    return [CpFrameGdnScanResult(*x) if plan.has_final else (x[0], x[1]) for plan, x in zip(plans, ranks, strict=True)]


class _Scan(torch.autograd.Function):
    """The ranks of this process, one or in a simulation all: an exchange forward, an exchange backward."""

    @staticmethod
    def forward(
        ctx: Any, plans: list[ScanPlan], exchange: Exchange, tie: Tensor, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        ranks = [(plan, tensors[4 * i : 4 * i + 4]) for i, plan in enumerate(plans)]
        own = [plan.publish({s: _summary(plan, s, maps) for s, maps in _maps(plan, x).items()}) for plan, x in ranks]
        gathered = exchange(own, "forward")
        saved: list[Tensor] = []
        results: list[Tensor | None] = []
        for (plan, given), buffer in zip(ranks, own, strict=True):
            entry, final = plan.entries(gathered)
            for (stream, maps), like in zip(_maps(plan, given).items(), given[1::2], strict=True):
                states = affine.states_between(maps, entry[stream])
                states += states[-1:] * (like.shape[1] - plan.active)
                results.append(_stack([_border(x, stream) for x in states[1:]], like))
            results += [_border(final[s], s).to(given[0].dtype).contiguous() if final else None for s in plan.streams]
            saved += [*given, *entry.values(), *plan.kept(gathered, buffer)]
        ctx.plans, ctx.exchange = plans, exchange
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, tie)
        return tuple(results)

    @staticmethod
    @once_differentiable("cp_frame_gdn_scan")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ranks: list[_Arrived] = []
        buffers = []
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them a single time
        for i, plan in enumerate(ctx.plans):
            given, rest = saved[8 * i : 8 * i + 4], saved[8 * i + 4 : 8 * i + 8]
            rank = _Arrived(plan, given, rest, gradients[4 * i : 4 * i + 4])
            buffers.append(plan.publish_backward(rank.gamma(), rank.dfinal, rest[3]))
            ranks.append(rank)
        gathered = ctx.exchange(buffers, "backward")
        found = [x for rank in ranks for x in rank.finish(gathered)]
        needs = ctx.needs_input_grad[3:]
        return (None, None, None, *(x if need else None for x, need in zip(found, needs, strict=True)))


class _Arrived:
    """The backward of one rank: what arrived at its states, in the left form, before and after the exchange."""

    def __init__(
        self, plan: ScanPlan, given: Sequence[Tensor], rest: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        self.plan, self.given, self.entry, self.transitions = plan, given, rest[:2], rest[2]
        self.maps = _maps(plan, given)
        self.dfinal = {s: None if g is None else _inner(g, s) for s, g in zip(plan.streams, gradients[2:], strict=True)}
        self.dstates: dict[str, list[Tensor]] = {}
        self.dexit: dict[str, Tensor] = {}
        for stream, like, gradient in zip(plan.streams, given[1::2], gradients[:2], strict=True):
            arrived = _inner(torch.zeros_like(like) if gradient is None else gradient, stream).to(plan.dtype)
            self.dstates[stream] = list(arrived[:, : plan.active].unbind(1))
            self.dexit[stream] = arrived[:, plan.active :].sum(1)  # idle frames repeat the exit state

    def gamma(self) -> dict[str, Tensor]:
        """Return the gradients of the entry states if later ranks give none to the exit states."""
        return {s: _sweep(self.maps[s], self.dstates[s], self.dexit[s])[-1] for s in self.plan.streams}

    def finish(self, gathered: Tensor) -> list[Tensor]:
        """Return the gradients of the four inputs, from the exit states' gradients that the exchange gave."""
        exits = self.plan.exits(gathered, self.transitions)
        found = []
        for stream, entry, W, U in zip(self.plan.streams, self.entry, self.given[::2], self.given[1::2], strict=True):
            *swept, _ = _sweep(self.maps[stream], self.dstates[stream], self.dexit[stream] + exits[stream])
            before = affine.states_between(self.maps[stream], entry)[:-1]
            steps = [affine.product(d, x.mT) for d, x in zip(swept, before, strict=True)]
            found.append(_stack([x.mT for x in steps] if stream == "kv" else steps, W))
            found.append(_stack([_border(d, stream) for d in swept], U))
        return found


def _maps(plan: ScanPlan, given: Sequence[Tensor]) -> dict[str, list[AffineMap]]:
    """Return the maps of the active frames, in the left form."""
    W_kv, U_kv, W_z, U_z = (x[:, : plan.active] for x in given)
    operators = {"kv": (W_kv.mT, U_kv.mT), "z": (W_z, U_z[..., None])}
    return {
        stream: [AffineMap(*pair) for pair in zip(transition.unbind(1), increment.unbind(1), strict=True)]
        for stream, (transition, increment) in operators.items()
    }


def _summary(plan: ScanPlan, stream: str, maps: Sequence[AffineMap]) -> AffineMap:
    """Collapse frames to one map: a scan of the columns ``[increment | transition]``. No frames are the identity."""
    columns = plan.width if stream == "kv" else 1
    eye = torch.eye(plan.width, dtype=plan.dtype, device=plan.device).expand(*plan.lead, -1, -1)
    pad = (0, plan.width)
    wide = [AffineMap(m.transition, torch.nn.functional.pad(m.increment, pad)) for m in maps]
    state = affine.fold(wide, torch.nn.functional.pad(eye, (columns, 0)))
    return AffineMap(state[..., columns:], state[..., :columns])


def _sweep(maps: Sequence[AffineMap], dstates: Sequence[Tensor], dexit: Tensor) -> list[Tensor]:
    """Return the total gradient of every state, in the order of frames, and that of the entry state last."""
    if not maps:
        return [dexit]
    increments = [*dstates[-2::-1], torch.zeros_like(dexit)]
    adjoints = [AffineMap(m.transition.mT, x) for m, x in zip(maps[::-1], increments, strict=True)]
    *swept, gamma = affine.states_between(adjoints, dexit + dstates[-1])
    return [*swept[::-1], gamma]


def _border(x: Tensor, stream: str) -> Tensor:
    return x.mT if stream == "kv" else x.squeeze(-1)


def _inner(x: Tensor, stream: str) -> Tensor:
    return x.mT if stream == "kv" else x[..., None]


def _stack(steps: Sequence[Tensor], like: Tensor) -> Tensor:
    """Stack what belongs to frames on dim 1 of a tensor like ``like``; zeros for frames that are left."""
    stacked = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    for t, x in enumerate(steps):
        stacked[:, t] = x
    return stacked
