"""What blocks of frame-wise gated delta networks share: parameters, order of operations, streams, ranks.

Letters, as suffixes of locals where they help: B batch, F frames of this rank, S = h*w tokens of a frame, N = F*S
frame-major, C = H*D channels, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn

from gdn_cp import FramePartition, cp_frame_gdn
from gdn_kernels import Direction, FrameState, RotaryTables, checks, frame_gdn, rotary_tables
from gdn_models.cache import ConvTails, GDNState, check_state, check_state_request, check_tails, zero_tails
from gdn_models.clip import Clip, check_frame_valid, check_grid, mask_tokens
from gdn_models.clip_conv import convolve_clip
from gdn_models.config import FrameGDNConfig, config_of
from gdn_models.gates import Grid, frame_decay, gate_output, key_scale, write_strength
from gdn_models.layers import require_plain
from gdn_models.parallel import ContextParallelModule, raise_on_all_ranks
from gdn_models.temporal_conv import TemporalConv

GATE_BIAS = 5.0  # sigmoid(5) = 0.99331: write almost everything, forget almost nothing
OPEN_GATE = 1.278464542761074  # its SiLU is 1


class FrameGDNBlock(ContextParallelModule):
    """What the classes of `gdn_models.frame_gdn` share; use one of them.

    Subclasses say which frames are read: ``direction``, whether chunk starts cut it (``has_chunks``), and whether a
    clip can be read in several calls (``can_stream``).
    """

    direction: ClassVar[Direction]
    has_chunks: ClassVar[bool] = False
    can_stream: ClassVar[bool] = True
    config_kind: ClassVar[type[FrameGDNConfig]] = FrameGDNConfig

    def __init__(
        self,
        config: FrameGDNConfig | None = None,
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
            **options: fields of `FrameGDNConfig`, in place of ``config``.

        Raises:
            TypeError: Both or neither of ``config`` and ``options``, or an unknown field.
            ValueError: A value that `FrameGDNConfig` refuses.
        """
        super().__init__()
        self.config = config = config_of(self.config_kind, config, options, type(self).__name__)
        dim, heads = config.dim, config.heads
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(dim, 3 * dim, bias=config.qkv_bias, **factory)
        self.proj = nn.Linear(dim, dim, **factory)
        self.q_norm = nn.RMSNorm(dim, config.norm_eps, **factory) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(dim, config.norm_eps, **factory) if config.qk_norm else None
        self.beta_proj = nn.Linear(dim, heads, **factory)
        self.gate_proj = nn.Linear(dim, heads, **factory)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.A_log = nn.Parameter(torch.empty(heads, device=device, dtype=wide))
        self.dt_bias = nn.Parameter(torch.empty(heads, device=device, dtype=wide))
        self.output_gate = nn.Linear(dim, dim, **factory) if config.output_gate else None
        q, k, v = config.conv_qv, True, config.conv_qv
        self.conv_q, self.conv_k, self.conv_v = (
            TemporalConv(dim, config.conv_size, **factory) if used and config.conv_size else None for used in (q, k, v)
        )
        self._add_parameters(factory)
        self.reset_parameters()

    def _add_parameters(self, factory: dict[str, Any]) -> None:
        """Make the parameters of a subclass, before all are reset."""

    def reset_parameters(self) -> None:
        """Set the initial values that the class lists.

        They do not depend on what was there before, so a model-wide initialisation may be followed by it.
        """
        for layer in (self.qkv, self.proj):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                nn.init.ones_(norm.weight)
        for gate, bias in ((self.beta_proj, GATE_BIAS), (self.gate_proj, 0.0), (self.output_gate, OPEN_GATE)):
            if gate is not None:
                nn.init.zeros_(gate.weight)
                nn.init.constant_(gate.bias, bias)
        nn.init.zeros_(self.A_log)
        nn.init.constant_(self.dt_bias, -GATE_BIAS)
        for conv in self._convolutions():
            if conv is not None:
                conv.reset_parameters()

    def init_state(
        self,
        batch: int,
        grid: Grid,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GDNState:
        """Return the state of a stream that has read nothing: zeros.

        Args:
            batch: B.
            grid: (F, h, w) of the calls to come, which must have its h and w; F is not looked at.
            device: of the state; that of the parameters if None.
            dtype: of the convolutions' tails, that of the tokens; of the parameters if None. The matrices are fp32, or
                fp64 if this is.

        Raises:
            ValueError: ``batch`` or a size is negative, or ``dtype`` is not a floating one.
            TypeError: An argument is of the wrong Python type.
            NotImplementedError: The block reads the future, and has no form that streams.
        """
        self._require_stream()
        config, (_, rows, columns) = self.config, check_grid(grid)
        weight = self.qkv.weight
        dtype, device = weight.dtype if dtype is None else dtype, weight.device if device is None else device
        check_state_request(batch, dtype)
        wide: dict[str, Any] = {
            "device": device, "dtype": torch.float64 if dtype == torch.float64 else torch.float32,
        }  # fmt: skip
        lead = (batch, config.heads, config.head_dim)
        tails = zero_tails(self._tail_shape(batch, rows * columns), self._tails_used(), device=device, dtype=dtype)
        kv, z = torch.zeros(*lead, config.head_dim, **wide), torch.zeros(lead, **wide)
        return GDNState(kv, z, tails, None, 0, (rows, columns))

    @overload
    def forward(
        self, x: Tensor, grid: Grid, *, chunk_starts: Sequence[int] | None = None, frame_valid: Tensor | None = None,
        state: None = None, partition: FramePartition | None = None,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, x: Tensor, grid: Grid, *, chunk_starts: Sequence[int] | None = None, state: GDNState,
    ) -> tuple[Tensor, GDNState]: ...  # fmt: skip

    def forward(
        self,
        x: Tensor,
        grid: Grid,
        *,
        chunk_starts: Sequence[int] | None = None,
        frame_valid: Tensor | None = None,
        state: GDNState | None = None,
        partition: FramePartition | None = None,
    ) -> Tensor | tuple[Tensor, GDNState]:
        """Mix the tokens of a clip, or of this rank's frames of it.

        Args:
            x: ``[B, N, C]`` in the dtype of the parameters (any floating dtype under autocast), any strides; N = F*h*w,
                frame-major.
            grid: (F, h, w): frames of this rank, rows and columns of a frame's tokens.
            chunk_starts: increasing frames at which chunks start, counted over the whole clip; 0 is optional. For
                `ChunkCausalGDN` only; None is one chunk.
            frame_valid: ``[B, F]``, ``[B, 1, F]`` or ``[B, 1, F, 1, 1]``, bool or 0/1 floats, local frames. An invalid
                frame is transparent: valid frames get what they would get if it held zeros, and its output is 0.
            state: what the call before returned, or `init_state`: the frames follow those that it has read, of the
                same h and w. One call is one or more whole chunks; ``chunk_starts`` counts from its first frame. Not
                written to.
            partition: frames of each rank, the same on every rank; None is what `apply_context_parallel` was given.

        Returns:
            Tensor: ``[B, N, C]`` in the dtype of x; under autocast in that of the last projection. With a state: the
                tuple of that and the state after the last frame.

        Raises:
            ValueError: A shape, dtype, device or value is wrong, or chunk starts were given to a class without chunks.
            TypeError: An argument is of the wrong Python type; ``beta_proj``, ``gate_proj`` or a norm was replaced by a
                module that is not what it was: their weights are read, their forward never runs.
            NotImplementedError: A state with ``frame_valid``, a partition or a context of several ranks; a state for a
                class that reads the future; a split by heads with ``qk_norm``.
            RuntimeError: Context and partition do not go together, ranks disagree, or an exchange did not complete.
                An error of one rank's arguments is raised on all ranks the first time they meet in a group.

        Communication: with a context of several ranks one halo exchange (if ``conv_size > 1``) and one exchange of
            summaries, and the same again in backward. Every rank must call this: yes, also one without frames.
        """
        clip = self._clip(x, grid, chunk_starts, frame_valid, state, partition)
        return self._run(x, clip)

    def _run(self, x: Tensor, clip: Clip) -> Tensor | tuple[Tensor, GDNState]:
        """Compute what `forward` returns from checked arguments."""
        x = mask_tokens(x, clip)
        beta, decay = self._gates(x, clip)
        qkv, tails = self._convolve(self._project_qkv(x, clip), clip)
        mixed, final = self._mix(qkv, beta, decay, clip, self._rotation(clip, x.device))
        y = self._project(x, mixed.flatten(2), clip)
        if clip.state is None:
            return y
        assert final is not None
        return y, GDNState(final.kv, final.z, tails, None, clip.state.frames + clip.grid[0], clip.grid[1:])

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults, and the rank if a context is attached."""
        config = self.config
        shown = [f"dim={config.dim}", f"heads={config.heads}"]
        for field in type(config).__dataclass_fields__.values():
            value = getattr(config, field.name)
            if field.name not in ("dim", "heads") and value != field.default:
                shown.append(f"{field.name}={value!r}")
        if self.context is not None:
            shown.append(f"context_parallel=rank {self.context.rank} of {self.context.size}")
        return ", ".join(shown)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that an optimiser should not decay."""
        return {"A_log", "dt_bias"}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrameGDNBlock:
        """Convert parameters, but keep ``A_log`` and ``dt_bias`` from becoming narrower than fp32."""
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]

        def keep_wide(value: Tensor) -> Tensor:
            converted = fn(value)
            return converted if converted.dtype.itemsize >= 4 else value.to(converted.device, torch.float32)

        super()._apply(keep_wide, recurse=False)  # type: ignore[no-untyped-call]
        return self

    def _clip(self, *call: Any) -> Clip:
        """Check every argument, before anything is computed or sent. An error of one rank is an error on all."""
        context = self.context
        if context is None or context.is_trivial:
            return self._checked(*call)
        try:
            return self._checked(*call)
        except Exception as error:
            first = "halo_exchange" if self.config.conv_size > 1 else "cp_frame_gdn"
            raise_on_all_ranks(error, first, context, self.proj.weight.device)

    def _checked(
        self,
        x: Tensor,
        grid: Grid,
        chunk_starts: Sequence[int] | None,
        frame_valid: Tensor | None,
        state: GDNState | None,
        partition: FramePartition | None,
    ) -> Clip:
        """Check every argument without reading device data."""
        for name, kind in self._layers_read():
            require_plain(name, getattr(self, name), kind)
        grid = check_grid(grid)
        checks.require_rank("x", x, "B, N, C")
        tokens = grid[0] * grid[1] * grid[2]
        channels = self.qkv.in_features  # dim, unless the block was given some of the heads of a wider one
        if channels != self.config.dim and self.config.qk_norm:
            raise NotImplementedError(
                f"qk_norm over {channels} channels, of which this block holds {self.config.dim}, is not supported: "
                "only a block with qk_norm=False can be split by heads"
            )
        checks.require_shape("x", x, "B, N = F*h*w, C = dim", (x.shape[0], tokens, channels))
        checks.require_device("x", x, self.proj.weight.device, "the parameters")
        if not torch.is_autocast_enabled(x.device.type):
            checks.require_dtype("x", x, (self.proj.weight.dtype,))
        checks.require_dtype("x", x, checks.FLOATING)
        shard = self.shard(grid[0], partition)
        if chunk_starts is not None and not self.has_chunks:
            raise ValueError(f"chunk_starts must be None for {type(self).__name__}, which has no chunks")
        interior = checks.as_chunk_starts(chunk_starts, shard.total)
        valid = check_frame_valid(frame_valid, x, grid[0])
        if state is not None:
            self._check_state(state, x, grid, valid, partition)
        return Clip(grid, valid, interior, shard, state)

    def _layers_read(self) -> list[tuple[str, type[nn.Module]]]:
        """Return the layers whose weights are read, and what they must be."""
        norms = ("q_norm", "k_norm") if self.config.qk_norm else ()
        return [("beta_proj", nn.Linear), ("gate_proj", nn.Linear), *((name, nn.RMSNorm) for name in norms)]

    def _check_state(
        self, state: GDNState, x: Tensor, grid: Grid, valid: Tensor | None, partition: FramePartition | None
    ) -> None:
        """Check that a state may be given, and everything about it but its camera part."""
        self._require_stream()
        if valid is not None:
            raise NotImplementedError("state together with frame_valid is not supported: pass valid frames only")
        if partition is not None or (self.context is not None and not self.context.is_trivial):
            raise NotImplementedError("state under context parallelism is not supported: stream on one rank")
        config = self.config
        wide = torch.float64 if self.qkv.weight.dtype == torch.float64 else torch.float32
        check_state(state, grid, x.shape[0], config.heads, config.head_dim, wide, x)
        check_tails("state.conv", state.conv, self._tails_used(), self._tail_shape(x.shape[0], grid[1] * grid[2]), x)
        self._check_camera_state(state, x, grid)

    def _check_camera_state(self, state: GDNState, x: Tensor, grid: Grid) -> None:
        if state.camera is not None:
            raise ValueError(f"state.camera must be None for {type(self).__name__}, which has no camera branch")

    def _require_stream(self) -> None:
        if not self.can_stream:
            raise NotImplementedError(
                f"{type(self).__name__} reads the whole clip both ways and has no streaming form; "
                "use FrameGDN or ChunkCausalGDN, whose parameters have the same names"
            )

    def _tails_used(self) -> tuple[bool, bool, bool]:
        q, k, v = (conv is not None for conv in self._convolutions())
        return q, k, v

    def _tail_shape(self, batch: int, tokens: int) -> tuple[int, int, int, int]:
        return batch, max(self.config.conv_size - 1, 0), tokens, self.config.dim

    def _gates(self, x: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        """Return write strength ``[B, H, F, S]`` and decay ``[B, H, F]``."""
        return (
            write_strength(x, self.beta_proj.weight, self.beta_proj.bias, clip.grid),
            frame_decay(x, self.gate_proj.weight, self.gate_proj.bias, self.A_log, self.dt_bias, clip.grid),
        )

    def _project_qkv(self, x: Tensor, clip: Clip) -> Tensor:
        """Return q, k and v of all tokens, ``[B, N, 3C]``; zeros in invalid frames."""
        qkv: Tensor = self.qkv(x)
        return qkv if self.qkv.bias is None else mask_tokens(qkv, clip)

    def _convolve(self, qkv: Tensor, clip: Clip) -> tuple[Tensor, ConvTails]:
        """Convolve what the configuration says, ``[B, N, 3C]`` to ``[B, N, 3, H, D]``; also the tails of a stream."""
        batch, tokens, _ = qkv.shape
        layers = self._convolutions()
        tails: Sequence[Tensor | None] | None = clip.state.conv if clip.state is not None else None
        if any(layer is not None for layer in layers):
            parts = qkv.reshape(batch, clip.grid[0], clip.grid[1] * clip.grid[2], 3, self.config.dim).unbind(3)
            convolved, tails = convolve_clip(parts, layers, tails, clip, self.direction.reads_future)
            qkv = torch.stack(convolved, 3)
        tails = tails or (None, None, None)
        return qkv.reshape(batch, tokens, 3, self.config.heads, self.config.head_dim), (tails[0], tails[1], tails[2])

    def _mix(
        self, qkv: Tensor, beta: Tensor, decay: Tensor, clip: Clip, rope: RotaryTables | None
    ) -> tuple[Tensor, FrameState | None]:
        """Run the recurrence, here or over the ranks; ``[B, N, H, D]``, and the final state of a stream."""
        config, shard = self.config, clip.shard
        options: dict[str, Any] = {
            "rope": rope,
            "q_norm_weight": None if self.q_norm is None else self.q_norm.weight,
            "k_norm_weight": None if self.k_norm is None else self.k_norm.weight,
            "k_scale": key_scale(config.key_scale, config.head_dim, clip.grid),
            "direction": self.direction,
            "chunk_starts": clip.chunk_starts or None,
            "frame_valid": clip.frame_valid,
            "norm_eps": config.norm_eps,
            "eps": config.eps,
            "precision": config.precision,
            "impl": config.impl,
        }
        if shard.context is not None:
            output = cp_frame_gdn(
                qkv, beta, decay, context=shard.context, partition=shard.partition, **options
            ).output  # fmt: skip
            return output, None
        if clip.state is not None:
            options |= {"initial_state": FrameState(clip.state.kv, clip.state.z), "output_final_state": True}
        result = frame_gdn(qkv, beta, decay, **options)
        return result.output, result.final_state

    def _rotation(self, clip: Clip, device: torch.device) -> RotaryTables | None:
        """Make the rotary tables at the global positions of the local frames."""
        if self.config.rope_theta is None:
            return None
        return rotary_tables(
            clip.grid, self.config.head_dim, theta=self.config.rope_theta, frame_offset=clip.first, device=device
        )

    def _project(self, x: Tensor, mixed: Tensor, clip: Clip) -> Tensor:
        """Gate the mixed tokens ``[B, N, C]`` and project them."""
        dtype = mixed.dtype if torch.is_autocast_enabled(x.device.type) else self.proj.weight.dtype
        if self.output_gate is not None:
            mixed = gate_output(mixed, self.output_gate(x), dtype)
        projected: Tensor = self.proj(mixed.to(dtype))
        return mask_tokens(projected, clip)

    def _convolutions(self) -> tuple[TemporalConv | None, TemporalConv | None, TemporalConv | None]:
        return self.conv_q, self.conv_k, self.conv_v
