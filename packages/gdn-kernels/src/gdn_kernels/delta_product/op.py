"""The public operation of the gated delta product: checks, defaults and dispatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gdn_kernels import checks
from gdn_kernels.delta_product.torch_op import DeltaProductInputs, DeltaProductOptions, apply_torch
from gdn_kernels.types import DeltaProductResult, Impl

WIDEST_KEY = 256


def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    num_householder: int = 1,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    chunk_size: int = 64,
    impl: Impl | str = Impl.AUTO,
) -> DeltaProductResult:
    """Mix tokens with the gated delta rule, R corrections of the state per token.

        S   <- exp(g_t) S                                   once per token
        S   <- S + beta_tj k_tj' (v_tj - k_tj S)            j = 0 ... R-1, in order
        o_t  = scale q_t S                                  after the last step

    R = 1 is the gated delta rule, g = None the delta product. Value head h reads q and k of head ``h // (HV/H)``. With
    keys of at most unit length (see `l2_normalize`), beta in [0, 2] and g <= 0 no step can expand the state.

    Args:
        q: ``[B, T, H, K]``, fp16, bf16, fp32 or fp64, any strides; K up to 256.
        k: ``[B, T*R, H, K]``, in the dtype of q; row t*R + j is step j of token t.
        v: ``[B, T*R, HV, V]``, in the dtype of q; HV is a multiple of H.
        beta: ``[B, T*R, HV]``, write strength of each step. Any floating dtype.
        g: ``[B, T, HV]``, natural log of the decay per token, finite, <= 0 (`frame_gdn` takes the decay itself). A
            decay of 0 is any g whose exp is 0, as -1e4. Any floating dtype, fp32 is best. None is no decay, and costs
            less than zeros.
        num_householder: R, steps per token.
        scale: factor of the output, > 0; None is ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``, key-first, fp32 (fp64 for fp64 q); zeros if None. N is B, or the number of
            packed sequences. Receives a gradient.
        output_final_state: return the state after the last token of every sequence.
        cu_seqlens: ``[N+1]`` token offsets of sequences packed into one row, B = 1: from 0 to T, not decreasing; equal
            neighbours are an empty sequence. Ints, or an int32 or int64 tensor, whose values are read: one on a GPU is
            waited for, and ``torch.compile`` breaks its graph there. None is one sequence per batch row.
        chunk_size: rows (R per token) that are worked on at once, >= 1; a chunk has ``max(1, chunk_size // R)`` tokens.
            Any number gives the same result up to rounding.
        impl: ``"auto"`` and ``"torch"``: batched torch operations on any device. ``"triton"`` is not implemented.

    Returns:
        DeltaProductResult: ``output [B, T, HV, V]`` in the dtype of q, ``final_state [N, HV, K, V]`` in fp32 (fp64) or
            None.

    Raises:
        ValueError: A shape, dtype, device or value is wrong; the message names argument, rule and what came.
        TypeError: An argument is of the wrong Python type.
        NotImplementedError: ``impl="triton"``.

    Cost: with n = chunk_size, per row and value head about 2 n (K + V) + 6 K V flops, three times that backward; T*R/n
        dependent steps. Keeps its inputs only; forward and backward hold the state before every chunk,
        ``T*R/n * K * V`` numbers per value head.
    Gradient: of every tensor, once differentiable, by hand: nothing is recorded per chunk.
    Determinism: as the products it calls.
    Source: the steps are those of Siems et al., DeltaProduct, 2025; gate and chunk form those of Yang, Kautz and
        Hatamizadeh, Gated Delta Networks, 2024.

    Example:
        >>> q, k = torch.rand(1, 5, 2, 4), l2_normalize(torch.rand(1, 10, 2, 4))
        >>> v, beta, g = torch.rand(1, 10, 2, 3), torch.rand(1, 10, 2), -torch.rand(1, 5, 2)
        >>> result = gated_delta_product(q, k, v, beta, g, num_householder=2, output_final_state=True)
        >>> result.output.shape, result.final_state.shape
        (torch.Size([1, 5, 2, 3]), torch.Size([1, 2, 4, 3]))
    """
    inputs, options = delta_product_arguments(
        q, k, v, beta, g, num_householder, scale, initial_state, cu_seqlens, chunk_size
    )
    if checks.as_impl(impl) is Impl.TRITON:
        raise NotImplementedError(
            'impl="triton" does not run gated_delta_product; use impl="torch", or on a GPU the FLA backend of gdn_cp'
        )
    output, final_state = apply_torch(inputs, options)
    return DeltaProductResult(output, final_state if output_final_state else None)


def delta_product_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    num_householder: int,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | Sequence[int] | None,
    chunk_size: int,
) -> tuple[DeltaProductInputs, DeltaProductOptions]:
    """Check the arguments of `gated_delta_product`; return them as the implementation takes them."""
    checks.require_rank("q", q, "B, T, H, K")
    checks.require_dtype("q", q, checks.FLOATING)
    batch, tokens, heads, width = q.shape
    if heads < 1 or not 1 <= width <= WIDEST_KEY:
        raise ValueError(f"q must have shape [B, T, H, K] with H >= 1 and 1 <= K <= {WIDEST_KEY}, got {list(q.shape)}")
    steps = _as_count("num_householder", num_householder)
    rows = tokens * steps
    checks.require_shape("k", k, "B, T*R, H, K", (batch, rows, heads, width))
    checks.require_rank("v", v, "B, T*R, HV, V")
    value_heads, value_width = v.shape[2:]
    checks.require_shape("v", v, "B, T*R, HV, V", (batch, rows, value_heads, value_width))
    if value_heads < 1 or value_heads % heads or value_width < 1:
        raise ValueError(
            f"v must have shape [B, T*R, HV, V] with HV a multiple of H = {heads} and V >= 1, got {list(v.shape)}"
        )
    for name, operand in (("k", k), ("v", v)):
        checks.require_dtype(name, operand, (q.dtype,))
        checks.require_device(name, operand, q.device, "q")
    checks.require_shape("beta", beta, "B, T*R, HV", (batch, rows, value_heads))
    gates = [("beta", beta)]
    if g is not None:
        checks.require_shape("g", g, "B, T, HV", (batch, tokens, value_heads))
        gates.append(("g", g))
    for name, gate in gates:
        checks.require_dtype(name, gate, checks.FLOATING)
        checks.require_device(name, gate, q.device, "q")
    lengths = [tokens] * batch if cu_seqlens is None else _sequence_lengths(cu_seqlens, batch, tokens)
    if initial_state is not None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        shape = (len(lengths), value_heads, width, value_width)
        checks.require_state("initial_state", initial_state, "N, HV, K, V", shape, dtype, q.device)
    options = DeltaProductOptions(
        lengths,
        steps,
        max(1, _as_count("chunk_size", chunk_size) // steps),
        width**-0.5 if scale is None else checks.require_positive("scale", scale),
    )
    return DeltaProductInputs(q, k, v, beta, g, initial_state), options


def _as_count(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")
    return value


def _sequence_lengths(cu_seqlens: Tensor | Sequence[int], batch: int, tokens: int) -> list[int]:
    """Return the tokens of each packed sequence."""
    if isinstance(cu_seqlens, Tensor):
        checks.require_rank("cu_seqlens", cu_seqlens, "N+1")
        checks.require_dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
        bounds = cu_seqlens.tolist()
    elif isinstance(cu_seqlens, list | tuple) and all(
        isinstance(x, int) and not isinstance(x, bool) for x in cu_seqlens
    ):
        bounds = list(cu_seqlens)
    else:
        raise TypeError(f"cu_seqlens must be a torch.Tensor, a tuple of ints or None, got {type(cu_seqlens).__name__}")
    if batch != 1:
        raise ValueError(f"cu_seqlens needs B = 1, got B = {batch}")
    lengths = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or any(length < 0 for length in lengths):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {tokens}, got {bounds}")
    return lengths
