"""A call cut where other devices may join in: summarise a run of frames, run it from given entry states, and back.

This is what gdn-cp builds on. A pass over ranks is `begin`, an exchange of summaries, then `Run.finish` from the entry
states that the exchange gave; backward is `adjoint`, an exchange of its ``gamma``, then `Adjoint.finish`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gdn_kernels.reference.frame_gdn import frame_gdn_reference, summarize_reference
from gdn_kernels.types import FrameBoundary, FrameInputs, FrameOptions, FrameSummary, Impl


def begin(inputs: FrameInputs, options: FrameOptions, into: FrameSummary | None = None) -> Run:
    """Begin the forward of a run of frames whose entry states are not known yet; see `Run`.

    ``into``: contiguous tensors that the summary is written to, such as views of a buffer to be sent.
    """
    if options.impl is Impl.TRITON:
        from gdn_kernels.frame_gdn.triton_stages import TritonRun

        return TritonRun(inputs, options, into)
    return TorchRun(inputs, options, into)


class Run(Protocol):
    """The forward of a run of frames, in two steps with room for an exchange between them. Not differentiable.

    Attributes:
        summary: see `summarize`.
    """

    summary: FrameSummary

    def overlap(self) -> None:
        """Do what needs nothing from other devices: to be called while the exchange travels, or not at all."""

    def finish(self, entry: FrameBoundary) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
        """Run the frames from ``entry`` (None is zero); nothing is computed twice.

        Returns:
            tuple: result and denominator as `apply` returns them, and tensors for `adjoint`: what the local operation
                keeps for its own backward, which may be nothing.
        """


class TorchRun:
    """`Run` of the torch implementation."""

    def __init__(self, inputs: FrameInputs, options: FrameOptions, into: FrameSummary | None = None) -> None:
        self._inputs, self._options = inputs, options
        self.summary = summarize_reference(inputs, options)
        if into is not None:
            _copy(self.summary[:2], into[:2])
            _copy(self.summary.increment, into.increment)
            self.summary = into

    def overlap(self) -> None:
        """Do nothing: the reference runs in one go."""

    def finish(self, entry: FrameBoundary) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
        """Return result, denominator and nothing: the backward runs the reference again; see `Run`."""
        with torch.no_grad():
            result, denominator, _ = frame_gdn_reference(self._inputs, self._options, entry)
        return result, denominator, ()


def summarize(inputs: FrameInputs, options: FrameOptions) -> FrameSummary:
    """Collapse a run of frames to one affine map per stream and direction, in the state dtype.

    The increments of the reverse direction include the run's first frame and honour ``options.resets``, so maps of
    neighbours compose without a shift. An empty run is the identity. Not differentiable: see `Adjoint`.
    """
    return begin(inputs, options).summary


def apply(
    inputs: FrameInputs, options: FrameOptions, entry: FrameBoundary, *, want_exit: bool = True
) -> tuple[Tensor, Tensor | None, FrameBoundary]:
    """Run the frames from ``entry`` (None is zero); return the result, the denominator and the exit states.

    The result ``[B, N, H, D]`` is the output if ``options.divide``, else the numerator; the denominator ``[B, H, N]``
    is None if it was divided by, or without a z stream. Differentiable by autograd in the inputs and the entry states.
    Exit states that are not wanted may be None.
    """
    if options.impl is Impl.TRITON:
        from gdn_kernels.frame_gdn.triton_op import apply_triton

        return apply_triton(inputs, options, entry, want_exit)
    return frame_gdn_reference(inputs, options, entry)


def adjoint(
    inputs: FrameInputs,
    options: FrameOptions,
    entry: FrameBoundary,
    dresult: Tensor | None,
    ddenominator: Tensor | None,
    saved: Sequence[Tensor | None] = (),
    into: FrameBoundary | None = None,
) -> Adjoint:
    """Begin the backward of one `apply` or `Run`; see `Adjoint`.

    Args:
        inputs: as given to `apply`.
        options: as given to `apply`; they name the implementation.
        entry: as given to `apply`.
        dresult: gradient of the result, ``[B, N, H, D]``, any strides; None counts as zero.
        ddenominator: gradient of the denominator, ``[B, H, N]``, any strides; None counts as zero.
        saved: what `Run.finish` returned for this; without it the forward is run again.
        into: contiguous tensors that ``gamma`` is written to, such as views of a buffer to be sent.
    """
    if options.impl is Impl.TRITON:
        from gdn_kernels.frame_gdn.triton_stages import TritonAdjoint

        return TritonAdjoint(inputs, options, entry, dresult, ddenominator, saved, into)
    return TorchAdjoint(inputs, options, entry, dresult, ddenominator, into)


class Adjoint(Protocol):
    """The backward of one `apply`, in two steps with room for an exchange between them.

    Writes into none of its arguments but ``into``.

    Attributes:
        gamma: gradient of the entry states if the exit states get none. Never None where the entry is not.
    """

    gamma: FrameBoundary

    def overlap(self) -> None:
        """Do what needs nothing from other devices: to be called while the exchange travels, or not at all."""

    def finish(self, exit_gradient: FrameBoundary, needs: Sequence[bool]) -> FrameInputs:
        """Return the gradient of every input, given the gradients of the exit states (None counts as zero).

        Args:
            exit_gradient: gradients of the exit states.
            needs: one bool per field of `FrameInputs`; a gradient not needed is returned as None. Rotary tables and
                mask have none.

        Returns:
            FrameInputs: gradients in the dtype of their inputs. One that is needed is never None.
        """


class TorchAdjoint:
    """`Adjoint` of the torch implementation: autograd through a second run of the reference."""

    def __init__(
        self,
        inputs: FrameInputs,
        options: FrameOptions,
        entry: FrameBoundary,
        dresult: Tensor | None,
        ddenominator: Tensor | None,
        into: FrameBoundary | None = None,
    ) -> None:
        self._inputs = FrameInputs._make(
            [*(_leaf(x) for x in inputs[:-3]), *inputs[-3:]]
        )  # no gradient for tables and mask
        self._entry = FrameBoundary(*(_leaf(x) for x in entry))
        with torch.enable_grad():
            result, denominator, self._exit = frame_gdn_reference(self._inputs, options, self._entry)
        upstream = ((result, dresult), (denominator, ddenominator))
        self._upstream = [(y, dy) for y, dy in upstream if y is not None and dy is not None]
        self.gamma = FrameBoundary(*_gradients(self._upstream, self._entry, [x is not None for x in entry]))
        if into is not None:
            _copy(self.gamma, into)
            self.gamma = into

    def overlap(self) -> None:
        """Do nothing: autograd computes all gradients in one go."""

    def finish(self, exit_gradient: FrameBoundary, needs: Sequence[bool]) -> FrameInputs:
        """Return the gradient of every input; see `Adjoint`."""
        exits = [(y, dy) for y, dy in zip(self._exit, exit_gradient, strict=True) if y is not None and dy is not None]
        return FrameInputs._make(_gradients(self._upstream + exits, self._inputs, needs))


def _copy(found: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
    for x, y in zip(found, into, strict=True):
        if x is not None and y is not None:
            y.copy_(x)


def _leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_()


def _gradients(
    upstream: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradient of each needed leaf, zeros where no path reaches it, None for the others."""
    needs = [need and leaf is not None and leaf.requires_grad for leaf, need in zip(leaves, needs, strict=True)]
    wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need and leaf is not None]
    live = [(y, dy) for y, dy in upstream if y.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if live and wanted:
        results, gradients = zip(*live, strict=True)
        found = torch.autograd.grad(results, wanted, gradients, retain_graph=True, allow_unused=True)
    given = iter(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(wanted, found, strict=True))
    return [next(given) if need else None for need in needs]
