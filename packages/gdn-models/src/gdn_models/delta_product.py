"""Token-wise layer of the Gated Delta Product, for language models and other streams of tokens.

Letters: B batch, T tokens, C channels of the layer, H heads of q and k, HV of v, K and V their widths, R steps a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdn_cp import CPContext, TokenPartition, halo_exchange
from gdn_cp.delta_product import TorchGatedDeltaProductCPBackend, choose_backend, gdp_chunkwise_context_parallel
from gdn_cp.partition import Partition
from gdn_kernels import checks, gated_delta_product, l2_normalize
from gdn_models.cache import DeltaProductState, check_state_request
from gdn_models.config import GatedDeltaProductConfig, config_of
from gdn_models.gates import wide_dtype
from gdn_models.layers import require_plain
from gdn_models.parallel import ContextParallelModule, Shard, raise_on_all_ranks

PROJECTION_GAIN = 2**-2.5
LEAST_STEP, MOST_STEP, STEP_FLOOR = 1e-3, 0.1, 1e-4
_OP = "gdp_chunkwise_context_parallel"
_T = TypeVar("_T")


class GatedDeltaProduct(ContextParallelModule):
    """Causal layer whose state takes R Householder steps per token.

        q, k, v = SiLU(conv(x W'))                   k, v: R rows per token      q, k = unit vectors per head and step
        beta    = sigmoid(b_proj x) (times 2)        g = -exp(A_log) softplus(a_proj x + dt_bias)
        S       = exp(g_t) S, then S + beta_j k_j (v_j - k_j' S)' for each step        o_t = K ** -0.5 q_t' S
        y       = o_proj(RMSNorm(o) * SiLU(g_proj x))

    Parameters, their shapes and what `reset_parameters` sets them to:

    ===================================  ======================  =====================================================
    ``q_proj.weight``                    [H*K, C]                Xavier uniform, gain 2 ** -2.5
    ``k_proj.weight``                    [R*H*K, C]              the same; channels by step, head, width
    ``v_proj.weight``                    [R*HV*V, C]             the same
    ``b_proj.weight``                    [R*HV, C]               the same
    ``a_proj.weight``                    [HV, C]                 the same; absent without ``forget_gate``
    ``A_log``                            [HV], at least fp32     log of uniform in (0.001, 16); no weight decay
    ``dt_bias``                          [HV], at least fp32     softplus of it is log-uniform in (0.001, 0.1); likewise
    ``q_conv1d.weight``, k, v            [channels, 1, taps]     as `torch.nn.Conv1d`; absent with ``conv_size=0``
    ``g_proj.weight``                    [HV*V, C]               as ``q_proj``; absent without ``output_gate``
    ``o_norm.weight``                    [V]                     1
    ``o_proj.weight``                    [C, HV*V]               as ``q_proj``
    ===================================  ======================  =====================================================

    Names, shapes and defaults are those of the layer of flash-linear-attention (fla-org), of which nothing is needed.

    Example:
        >>> layer = GatedDeltaProduct(dim=16, heads=2, head_dim=8)
        >>> layer(torch.rand(1, 12, 16)).shape
        torch.Size([1, 12, 16])
    """

    partition_kind: ClassVar[type[Partition]] = TokenPartition
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        config: GatedDeltaProductConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """Make the parameters and reset them.

        Args:
            config: the configuration, or None.
            device: of the parameters.
            dtype: of the parameters except ``A_log`` and ``dt_bias``, which are never narrower than fp32.
            **options: fields of `GatedDeltaProductConfig`, in place of ``config``.

        Raises:
            TypeError: Both or neither of ``config`` and ``options``, or an unknown field.
            ValueError: A value that `GatedDeltaProductConfig` refuses.
        """
        super().__init__()
        self.config = config = config_of(GatedDeltaProductConfig, config, options, type(self).__name__)
        steps, values = config.num_householder, config.heads_of_values
        key_channels, value_channels = config.heads * config.head_dim, values * config.value_dim
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def linear(into: int, out: int, here: bool = True) -> nn.Linear | None:
            return nn.Linear(into, out, bias=False, **factory) if here else None

        self.q_proj = nn.Linear(config.dim, key_channels, bias=False, **factory)
        self.k_proj = nn.Linear(config.dim, steps * key_channels, bias=False, **factory)
        self.v_proj = nn.Linear(config.dim, steps * value_channels, bias=False, **factory)
        self.b_proj = nn.Linear(config.dim, steps * values, bias=False, **factory)
        self.a_proj = linear(config.dim, values, config.forget_gate)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for name in ("A_log", "dt_bias"):
            gate = nn.Parameter(torch.empty(values, device=device, dtype=wide)) if config.forget_gate else None
            self.register_parameter(name, gate)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(layer.out_features, config.conv_size, **factory) if config.conv_size else None
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        self.g_proj = linear(config.dim, value_channels, config.output_gate)
        self.o_norm = nn.RMSNorm(config.value_dim, config.norm_eps, **factory)
        self.o_proj = nn.Linear(value_channels, config.dim, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values that the class lists."""
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight, gain=PROJECTION_GAIN)
            elif isinstance(layer, ShortConv):
                layer.reset_parameters()
        nn.init.ones_(self.o_norm.weight)
        if self.config.forget_gate:
            with torch.no_grad():
                self.A_log.uniform_(1e-3, 16).log_()
                step = self.dt_bias.uniform_(math.log(LEAST_STEP), math.log(MOST_STEP)).exp_().clamp_(min=STEP_FLOOR)
                self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step

    def init_state(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> DeltaProductState:
        """Return the state of a stream that has read nothing: zeros.

        Args:
            batch: B.
            device: of the state; that of the parameters if None.
            dtype: of the convolutions' tails; of the parameters if None.

        Raises:
            ValueError: ``batch`` is negative, or ``dtype`` is not a floating one.
            TypeError: An argument is of the wrong Python type.
        """
        config, weight = self.config, self.q_proj.weight
        device, dtype = weight.device if device is None else device, weight.dtype if dtype is None else dtype
        check_state_request(batch, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        shape = (batch, config.heads_of_values, config.head_dim, config.value_dim)
        q, k, v = (
            None if conv is None else torch.zeros(batch, config.conv_size - 1, channels, device=device, dtype=dtype)
            for conv, channels in zip(self._convolutions(), self._channels(), strict=True)
        )
        return DeltaProductState(torch.zeros(shape, device=device, dtype=wide), (q, k, v))

    @overload
    def forward(
        self, x: Tensor, *, cu_seqlens: Sequence[int] | None = None, state: None = None,
        partition: TokenPartition | None = None,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(self, x: Tensor, *, state: DeltaProductState) -> tuple[Tensor, DeltaProductState]: ...

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Sequence[int] | None = None,
        state: DeltaProductState | None = None,
        partition: TokenPartition | None = None,
    ) -> Tensor | tuple[Tensor, DeltaProductState]:
        """Mix a stream of tokens, or this rank's tokens of it.

        Args:
            x: ``[B, T, C]`` in the dtype of the parameters (any floating dtype under autocast), any strides.
            cu_seqlens: first token of each of several sequences packed into one row, and the number of tokens, both
                counted over all ranks; host ints, B = 1. Sequences do not see one another. None: one per row.
            state: what the call before returned, or `init_state`: the tokens follow those it has read. Not written to.
            partition: tokens of each rank, the same on every rank; None is what `apply_context_parallel` was given.

        Returns:
            Tensor: ``[B, T, C]`` in the dtype of x; under autocast in that of the last projection. With a state: the
                tuple of that and the state after the last token.

        Raises:
            ValueError: A shape, dtype, device or value is wrong.
            TypeError: An argument is of the wrong Python type, or ``o_norm`` was replaced by something else.
            NotImplementedError: A state together with packed sequences, or under context parallelism; or
                ``backend="fla"`` and x is not of 16 bits on a CUDA device.
            ImportError: ``backend="fla"``, and FLA or a function of it is missing.
            RuntimeError: Context and partition do not go together, ranks disagree, or an exchange did not complete.
                An error of one rank's arguments is raised on all ranks the first time they meet in a group.

        Communication: with a context of several ranks one halo exchange (if ``conv_size > 1``) and one exchange of
            summaries, unless no sequence crosses ranks; the same again in backward. Every rank must call this: yes.
        """
        shard = self._check(x, cu_seqlens, state, partition)
        raw = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        (q, k, v), tails = self._convolve(raw, cu_seqlens, state, shard)
        batch, tokens, config = x.shape[0], x.shape[1], self.config
        rows, values = tokens * config.num_householder, config.heads_of_values
        q = l2_normalize(q.reshape(batch, tokens, config.heads, config.head_dim))
        k = l2_normalize(k.reshape(batch, rows, config.heads, config.head_dim))
        v = v.reshape(batch, rows, values, config.value_dim)
        beta, g = self._write_strength(x).reshape(batch, rows, values), self._log_decay(x)
        output, final = self._mix(q, k, v, g, beta, cu_seqlens, state, shard)
        y = self._project(x, output)
        if state is None:
            return y
        assert final is not None
        return y, DeltaProductState(final, tails)

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, cu_seqlens: Sequence[int] | None,
        state: DeltaProductState | None, shard: Shard,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Run the operation; also the state after the last token, if there was one before the first."""
        steps, keep = self.config.num_householder, state is not None
        initial = None if state is None else state.recurrent
        backend: Any = self._on_all_ranks(_OP, lambda: choose_backend(self.config.backend, q))
        if shard.context is None and isinstance(backend, TorchGatedDeltaProductCPBackend):
            return gated_delta_product(
                q, k, v, beta, g, num_householder=steps, initial_state=initial, output_final_state=keep,
                cu_seqlens=cu_seqlens, impl="torch",
            )  # fmt: skip
        context = CPContext.single() if shard.context is None else shard.context
        metadata = None
        if cu_seqlens is not None:
            partition = TokenPartition((q.shape[1],)) if shard.context is None else shard.partition
            metadata = partition.packed(tuple(cu_seqlens), context.rank, q.device)
        found: Any = gdp_chunkwise_context_parallel(
            q, k, v, g, beta, None, steps, self.config.head_dim**-0.5, None, backend,
            metadata=metadata, context=context, initial_state=initial, output_final_state=keep,
        )  # fmt: skip
        return found if keep else (found, None)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that an optimiser should not decay."""
        return {"A_log", "dt_bias"} if self.config.forget_gate else set()

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        return self.config.differences()

    def _apply(self, fn: Any, recurse: bool = True) -> GatedDeltaProduct:
        """Convert parameters, but keep ``A_log`` and ``dt_bias`` from becoming narrower than fp32."""
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]

        def keep_wide(value: Tensor) -> Tensor:
            converted: Tensor = fn(value)
            return converted if converted.dtype.itemsize >= 4 else value.to(converted.device, torch.float32)

        super()._apply(keep_wide, recurse=False)  # type: ignore[no-untyped-call]
        return self

    def _check(self, *call: Any) -> Shard:
        """Check every argument, before anything is computed or sent. An error of one rank is an error on all."""
        first = "halo_exchange" if self.config.conv_size > 1 else _OP
        return self._on_all_ranks(first, lambda: self._checked(*call))

    def _on_all_ranks(self, op: str, step: Callable[[], _T]) -> _T:
        """Return what ``step`` does; what it raises is raised on all ranks, which are about to call ``op``."""
        try:
            return step()
        except Exception as error:
            if self.context is None or self.context.is_trivial:
                raise
            raise_on_all_ranks(error, op, self.context, self.o_proj.weight.device)

    def _checked(
        self,
        x: Tensor,
        cu_seqlens: Sequence[int] | None,
        state: DeltaProductState | None,
        partition: TokenPartition | None,
    ) -> Shard:
        require_plain("o_norm", self.o_norm, nn.RMSNorm)
        checks.require_rank("x", x, "B, T, C")
        checks.require_shape("x", x, "B, T, C = dim", (*x.shape[:2], self.config.dim))
        checks.require_device("x", x, self.o_proj.weight.device, "the parameters")
        checks.require_dtype("x", x, checks.FLOATING)
        if not torch.is_autocast_enabled(x.device.type):
            checks.require_dtype("x", x, (self.o_proj.weight.dtype,))
        shard = self.shard(x.shape[1], partition)
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, x.shape[0], shard.total)
        if state is None:
            return shard
        if shard.context is not None:
            raise NotImplementedError("state under context parallelism is not supported: stream on one rank")
        if cu_seqlens is not None:
            raise NotImplementedError("state together with cu_seqlens is not supported: stream one sequence per row")
        if not isinstance(state, DeltaProductState):
            raise TypeError(f"state must be a DeltaProductState or None, got {type(state).__name__}")
        expected = self.init_state(x.shape[0], device="meta")
        checks.require_shape("state.recurrent", state.recurrent, "B, HV, K, V", tuple(expected.recurrent.shape))
        checks.require_dtype("state.recurrent", state.recurrent, (expected.recurrent.dtype,))
        checks.require_device("state.recurrent", state.recurrent, x.device, "x")
        _check_tails(state.conv, expected, x.device)
        return shard

    def _convolve(
        self, raw: Sequence[Tensor], cu_seqlens: Sequence[int] | None, state: DeltaProductState | None, shard: Shard
    ) -> tuple[list[Tensor], tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Convolve and activate q, k and v ``[B, T, channels]``; also the tails that a stream goes on with."""
        reach, found = self.config.conv_size - 1, []
        tails: list[Tensor | None] = [None, None, None]
        since = None if cu_seqlens is None else _tokens_since_start(cu_seqlens, shard, raw[0].device)
        extended: Sequence[Tensor | None] = [None, None, None]
        if shard.context is not None and reach > 0:
            joined = halo_exchange(torch.cat(list(raw), 2), reach, 0, 1, shard.context, shard.partition)
            extended = torch.split(joined, [x.shape[2] for x in raw], 2)
        for i, (x, conv, wide) in enumerate(zip(raw, self._convolutions(), extended, strict=True)):
            if conv is not None:
                if wide is None:
                    tail = None if state is None else state.conv[i]
                    before = x.new_zeros(x.shape[0], reach, x.shape[2]) if tail is None else tail.to(x.dtype)
                    wide = torch.cat([before, x], 1)
                x = conv(wide, since)  # without tokens too: the weight gets its gradient, and backward its exchange
                tails[i] = wide[:, wide.shape[1] - reach :].clone() if state is not None else None
            found.append(functional.silu(x))
        return found, (tails[0], tails[1], tails[2])

    def _write_strength(self, x: Tensor) -> Tensor:
        logits: Tensor = self.b_proj(x).to(wide_dtype(x))
        return logits.sigmoid() * (2.0 if self.config.allow_neg_eigval else 1.0)

    def _log_decay(self, x: Tensor) -> Tensor | None:
        """Natural logarithm of the decay, ``[B, T, HV]``, fp32 (fp64): rounded to 16 bits it would drift."""
        if self.a_proj is None:
            return None
        logits: Tensor = self.a_proj(x).to(wide_dtype(x))
        return -self.A_log.to(logits.dtype).exp() * functional.softplus(logits + self.dt_bias.to(logits.dtype))

    def _project(self, x: Tensor, output: Tensor) -> Tensor:
        """Normalise per head, gate and project ``[B, T, HV, V]``; in fp32 (fp64) up to one rounding."""
        wide = wide_dtype(output)
        normed = functional.rms_norm(
            output.to(wide), (self.config.value_dim,), self.o_norm.weight.to(wide), self.config.norm_eps
        )
        gated = normed.flatten(2)
        if self.g_proj is not None:
            gated = gated * functional.silu(self.g_proj(x).to(wide))
        y: Tensor = self.o_proj(gated.to(output.dtype))
        return y

    def _convolutions(self) -> tuple[ShortConv | None, ShortConv | None, ShortConv | None]:
        return self.q_conv1d, self.k_conv1d, self.v_conv1d

    def _channels(self) -> tuple[int, int, int]:
        return self.q_proj.out_features, self.k_proj.out_features, self.v_proj.out_features


class ShortConv(nn.Module):
    """Causal depthwise convolution over tokens, weight ``[channels, 1, taps]``, the last tap on the present token."""

    def __init__(self, channels: int, size: int, **factory: Any) -> None:
        """Make the weight and reset it."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, size, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `torch.nn.Conv1d` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor, since: Tensor | None = None) -> Tensor:
        """Convolve ``x [B, taps - 1 + T, channels]``, whose first tokens have no result.

        ``since [T]``: how many tokens of its own sequence lie before each token; None: all that are there.
        """
        channels, _, taps = self.weight.shape
        if x.shape[1] < taps:  # no token; the weight stays in the graph
            return x[:, :0] * self.weight[:, 0].sum(-1).to(x.dtype)
        if since is None:
            return functional.conv1d(x.mT, self.weight, groups=channels).mT
        tokens = x.shape[1] - taps + 1
        y = x[:, taps - 1 :] * self.weight[:, 0, taps - 1]
        for back in range(1, taps):
            seen = (since >= back).to(x.dtype)[:, None]
            y = y + x[:, taps - 1 - back : taps - 1 - back + tokens] * (seen * self.weight[:, 0, taps - 1 - back])
        return y

    def extra_repr(self) -> str:
        """Return channels and taps."""
        return f"{self.weight.shape[0]}, size={self.weight.shape[2]}"


def check_cu_seqlens(cu_seqlens: Sequence[int], batch: int, tokens: int) -> None:
    """Raise unless ``cu_seqlens`` are host ints that start at 0, do not decrease and end at T, for one row."""
    if isinstance(cu_seqlens, Tensor) or not all(isinstance(n, int) and not isinstance(n, bool) for n in cu_seqlens):
        raise TypeError(f"cu_seqlens must be a tuple of ints, got {type(cu_seqlens).__name__}")
    given = tuple(cu_seqlens)
    if len(given) < 2 or given[0] != 0 or given[-1] != tokens or any(b < a for a, b in zip(given, given[1:])):
        raise ValueError(f"cu_seqlens must start at 0, not decrease and end at T = {tokens}, got {given}")
    if batch != 1:
        raise ValueError(f"cu_seqlens need B = 1, all sequences in one row, got B = {batch}")


def _check_tails(tails: object, expected: DeltaProductState, device: torch.device) -> None:
    """Raise unless these are tails of the convolutions in use, shaped as expected, floating, on the device of x."""
    if not isinstance(tails, tuple):
        raise TypeError(f"state.conv must be a tuple of the tails of q, k and v, got {type(tails).__name__}")
    if len(tails) != len(expected.conv):
        raise ValueError(f"state.conv must hold the tails of q, k and v, got {len(tails)}")
    for letter, tail, wanted in zip("qkv", tails, expected.conv, strict=True):
        name = f"state.conv of {letter}"
        if (tail is None) != (wanted is None):
            raise ValueError(f"{name} must be {'None' if wanted is None else 'a tensor'}")
        if tail is not None and wanted is not None:
            checks.require_shape(name, tail, "B, taps - 1, channels", tuple(wanted.shape))
            checks.require_dtype(name, tail, checks.FLOATING)
            checks.require_device(name, tail, device, "x")


def _tokens_since_start(cu_seqlens: Sequence[int], shard: Shard, device: torch.device) -> Tensor:
    """Return how many tokens of its own sequence lie before each local token, on whatever rank, ``[T]``."""
    runs = []
    for start, stop in zip(cu_seqlens, cu_seqlens[1:]):
        first, last = max(start, shard.first), min(stop, shard.first + shard.frames)
        if first < last:
            runs.append(torch.arange(first - start, last - start))
    since = torch.cat(runs) if runs else torch.arange(0)
    return (since.pin_memory() if device.type == "cuda" else since).to(device, non_blocking=True)
