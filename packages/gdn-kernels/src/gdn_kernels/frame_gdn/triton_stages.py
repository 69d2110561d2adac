"""The Triton phases strung together: forward, and backward in two halves with room for an exchange between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_kernels.frame_gdn.adjoint_summary import adjoint_summary
from gdn_kernels.frame_gdn.call import TritonCall, triton_call
from gdn_kernels.frame_gdn.layouts import within_tile_reach
from gdn_kernels.frame_gdn.phase_a import phase_a
from gdn_kernels.frame_gdn.phase_a_bwd import phase_a_bwd
from gdn_kernels.frame_gdn.phase_b import FrameHistories, phase_b
from gdn_kernels.frame_gdn.phase_b_bwd import ScanGradients, operators_bwd, phase_b_bwd
from gdn_kernels.frame_gdn.phase_c import phase_c
from gdn_kernels.frame_gdn.phase_c_bwd import ReadOutGradients, phase_c_bwd
from gdn_kernels.frame_gdn.qk_norm import qk_norm, qk_norm_bwd, rms_statistic
from gdn_kernels.frame_gdn.summary import summary
from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions, FrameSummary, FrameTransitions


class Prepared(NamedTuple):
    """The call's flags and operands, and gates with the mask applied, fp32."""

    call: TritonCall
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor


class Saved(NamedTuple):
    """What forward leaves for backward; nothing of the size of the tokens times D."""

    rho_q: Tensor | None
    rho_k: Tensor | None
    p_kv: Tensor
    p_z: Tensor | None
    forward_kv: Tensor | None
    forward_z: Tensor | None
    reverse_kv: Tensor | None
    reverse_z: Tensor | None

    def histories(self) -> FrameHistories:
        """Return the states at the frame boundaries."""
        return FrameHistories(*self[4:])

    def transitions(self) -> FrameTransitions:
        """Return the operators; the increments are not kept, no backward reads them."""
        return FrameTransitions(self.p_kv, self.p_kv, self.p_z, None)


def prepare(inputs: FrameInputs, options: FrameOptions) -> Prepared:
    """Gather what the phases share. Gates are widened to fp32: 16-bit ones would lose what the state keeps."""
    q, k, v = (within_tile_reach(x) for x in inputs.operands())
    beta, decay = inputs.beta.float(), inputs.decay.float()
    if inputs.frame_valid is not None:
        valid = inputs.frame_valid.float()[:, None, :]
        beta, decay = beta * valid[..., None], decay * valid + (1 - valid)
    return Prepared(triton_call(inputs, options), q, k, v, beta.contiguous(), decay.contiguous())


def write(prepared: Prepared) -> tuple[Tensor | None, Tensor | None, FrameTransitions]:
    """Return the RMS statistics of q and k, and the frame operators."""
    call, q, k, v, beta, _ = prepared
    rho_q, rho_k = qk_norm(q, k, call.norm_eps) if call.has_norm else (None, None)
    return rho_q, rho_k, phase_a(call, k, v, beta, rho_k)


class Read(NamedTuple):
    """Result, denominator (kept for the backward even if it was divided by), exit states, what the backward needs."""

    result: Tensor
    denominator: Tensor | None
    exits: FrameBoundary
    saved: Saved


def forward(prepared: Prepared, options: FrameOptions, entry: FrameBoundary, want_exit: bool) -> Read:
    """Run all phases; exit states are None unless wanted."""
    return read_states(prepared, options, *write(prepared), entry, want_exit)


def read_states(
    prepared: Prepared,
    options: FrameOptions,
    rho_q: Tensor | None,
    rho_k: Tensor | None,
    transitions: FrameTransitions,
    entry: FrameBoundary,
    want_exit: bool,
) -> Read:
    """Run the phases after `write`: scan the states from ``entry``, and read them out."""
    call, q, _, _, beta, decay = prepared
    histories = phase_b(call, transitions, decay, options.direction, options.resets, entry)
    dtype = q.dtype if options.divide else torch.float32
    result, denominator = phase_c(call, q, beta.shape[2], rho_q, histories, dtype)
    saved = Saved(rho_q, rho_k, transitions.p_kv, transitions.p_z, *histories)
    exits = histories.exits() if want_exit else FrameBoundary(None, None, None, None)
    return Read(result, denominator, exits, saved)


class GradientBuffers(NamedTuple):
    """Gradients of q, k, v: views of one ``dqkv``, or three tensors."""

    dqkv: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor


def gradient_buffers(inputs: FrameInputs) -> GradientBuffers:
    """Allocate the gradients of the operands in the form the operands have."""
    if inputs.qkv is not None:
        dqkv = torch.empty(inputs.qkv.shape, dtype=inputs.qkv.dtype, device=inputs.qkv.device)
        return GradientBuffers(dqkv, *dqkv.unbind(2))
    return GradientBuffers(None, *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs.operands()))


def read_out_backward(
    prepared: Prepared,
    saved: Saved,
    result: Tensor,
    denominator: Tensor | None,
    dresult: Tensor | None,
    ddenominator: Tensor | None,
    buffers: GradientBuffers,
) -> ReadOutGradients:
    """First half: the query's gradient, and the read-out's gradient of every frame's state. Local to the device."""
    call, q, _, _, beta, _ = prepared
    if dresult is None:
        dresult = torch.zeros((), dtype=result.dtype, device=result.device).expand(result.shape)
    if call.divide:
        ddenominator = None  # it has been divided by: no gradient arrives at it, and the kernel writes its own
    elif call.has_z:
        assert denominator is not None
        ddenominator = torch.zeros_like(denominator) if ddenominator is None else ddenominator.float().contiguous()
    return phase_c_bwd(
        call, q, beta.shape[2], saved.rho_q, saved.histories(), result, denominator, within_tile_reach(dresult),
        ddenominator, buffers.dq,
    )  # fmt: skip


def query_norm_backward(prepared: Prepared, saved: Saved, read_out: ReadOutGradients, buffers: GradientBuffers) -> None:
    """Finish the query's gradient, in place: the part of its norm that couples heads. Local to the device."""
    if saved.rho_q is not None:
        assert read_out.u is not None
        qk_norm_bwd(prepared.q, buffers.dq, read_out.u, saved.rho_q)


def sweep_backward(
    prepared: Prepared, options: FrameOptions, saved: Saved, read_out: ReadOutGradients, exit_gradient: FrameBoundary
) -> ScanGradients:
    """Sweep the states' gradients over the frames from the gradients of the exit states (None: zero)."""
    return phase_b_bwd(
        prepared.call, saved.transitions(), prepared.decay, options.direction, options.resets, saved.histories(),
        read_out.c, read_out.cz, exit_gradient,
    )  # fmt: skip


def write_backward(
    inputs: FrameInputs, prepared: Prepared, saved: Saved, read_out: ReadOutGradients, scans: ScanGradients,
    buffers: GradientBuffers,
) -> FrameInputs:  # fmt: skip
    """Second half: from the swept gradients to those of every input, in the inputs' dtypes.

    The query's gradient in the buffers is finished before, by `query_norm_backward`.
    """
    call, _, k, v, beta, decay = prepared
    histories = saved.histories()
    operators = operators_bwd(call, decay, histories, scans)
    writes = phase_a_bwd(call, k, v, beta, decay, saved.rho_k, operators, histories, scans, buffers.dk, buffers.dv)
    if saved.rho_k is not None:
        assert writes.u is not None
        qk_norm_bwd(k, buffers.dk, writes.u, saved.rho_k)
    dbeta, ddecay = writes.dbeta, scans.ddecay
    if inputs.frame_valid is not None:
        valid = inputs.frame_valid.float()[:, None, :]
        dbeta, ddecay = dbeta * valid[..., None], ddecay * valid
    packed = buffers.dqkv is not None
    dq, dk, dv = (None, None, None) if packed else buffers[1:]
    return FrameInputs(
        buffers.dqkv, dq, dk, dv, dbeta.to(inputs.beta.dtype),
        ddecay.to(inputs.decay.dtype), _like(read_out.dw, inputs.q_norm_weight), _like(writes.dw, inputs.k_norm_weight),
        None, None, None,
    )  # fmt: skip


def _like(gradient: Tensor | None, weight: Tensor | None) -> Tensor | None:
    return gradient.to(weight.dtype) if gradient is not None and weight is not None else None


class TritonRun:
    """`Run` of the Triton implementation: the operators that the summary is made of are those of the seeded scan."""

    def __init__(self, inputs: FrameInputs, options: FrameOptions, into: FrameSummary | None = None) -> None:
        with torch.no_grad():
            self._options, self._prepared = options, prepare(inputs, options)
            call, _, k, v, beta, decay = self._prepared
            self._rho_k = rms_statistic(k, call.norm_eps) if call.has_norm else None
            self._rho_q: Tensor | None = None
            self._transitions = phase_a(call, k, v, beta, self._rho_k)
            self.summary = summary(call, self._transitions, decay, options.direction, options.resets, into)

    def overlap(self) -> None:
        """Take the statistics of the query, which only the read-out needs; see `Run`."""
        call, q = self._prepared.call, self._prepared.q
        if call.has_norm and self._rho_q is None:
            with torch.no_grad():
                self._rho_q = rms_statistic(q, call.norm_eps)

    def finish(self, entry: FrameBoundary) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
        """Return result, denominator and what the backward needs; see `Run`."""
        self.overlap()
        with torch.no_grad():
            read = read_states(
                self._prepared, self._options, self._rho_q, self._rho_k, self._transitions, entry, want_exit=False
            )
        raw = self._options.has_z and not self._options.divide
        return read.result, read.denominator if raw else None, (read.result, read.denominator, *read.saved)


class TritonAdjoint:
    """`Adjoint` of the Triton implementation: the seeded sweeps come after the exchange, everything else before."""

    def __init__(
        self,
        inputs: FrameInputs,
        options: FrameOptions,
        entry: FrameBoundary,
        dresult: Tensor | None,
        ddenominator: Tensor | None,
        saved: Sequence[Tensor | None],
        into: FrameBoundary | None = None,
    ) -> None:
        with torch.no_grad():
            self._inputs, self._options = inputs, options
            self._prepared = prepare(inputs, options)
            if saved:
                result, denominator = saved[:2]
                self._saved = Saved(*saved[2:])  # type: ignore[arg-type]
            else:
                rho_q, rho_k, transitions = write(self._prepared)
                result, denominator, _, self._saved = read_states(
                    self._prepared, options, rho_q, rho_k, transitions, entry, want_exit=False
                )
            assert result is not None
            self._buffers = gradient_buffers(inputs)
            self._read_out = read_out_backward(
                self._prepared, self._saved, result, denominator, dresult, ddenominator, self._buffers
            )
            call, decay = self._prepared.call, self._prepared.decay
            c, cz = self._read_out.c, self._read_out.cz
            self.gamma = adjoint_summary(
                call, self._saved.transitions(), decay, options.direction, options.resets, c, cz, into
            )
            self._query_is_done = False

    def overlap(self) -> None:
        """Finish the query's gradient, which needs nothing from other devices; see `Adjoint`."""
        if not self._query_is_done:
            with torch.no_grad():
                query_norm_backward(self._prepared, self._saved, self._read_out, self._buffers)
            self._query_is_done = True

    def finish(self, exit_gradient: FrameBoundary, needs: Sequence[bool]) -> FrameInputs:
        """Return the gradient of every input; see `Adjoint`."""
        self.overlap()
        with torch.no_grad():
            scans = sweep_backward(self._prepared, self._options, self._saved, self._read_out, exit_gradient)
            found = write_backward(self._inputs, self._prepared, self._saved, self._read_out, scans, self._buffers)
        return FrameInputs._make(gradient if need else None for gradient, need in zip(found, needs, strict=True))
