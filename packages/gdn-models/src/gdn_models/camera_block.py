"""What the blocks with a camera branch share: the branch's parameters, and its way through streams and ranks.

Letters: B batch, F frames of this rank, S = h*w tokens of a frame, N = F*S frame-major, C = H*D channels, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from gdn_cp import FramePartition, cp_frame_gdn_numerator
from gdn_kernels import (
    RayTransforms,
    RotaryTables,
    camera_operands,
    camera_output,
    camera_rotary_tables,
    checks,
    frame_gdn_numerator,
)
from gdn_kernels.camera.op import choose_impl
from gdn_models.block import FrameGDNBlock
from gdn_models.cache import CameraState, ConvTails, GDNState, check_tails, zero_tails
from gdn_models.clip import Clip, mask_tokens
from gdn_models.clip_conv import convolve_clip
from gdn_models.config import CameraGDNConfig
from gdn_models.gates import Grid, discounted_strength, key_scale
from gdn_models.parallel import agree_on_call
from gdn_models.temporal_conv import TemporalConv
from gdn_models.ucpe import check_camera, ray_transforms

Camera = Tensor | RayTransforms


class CameraGDNBlock(FrameGDNBlock):
    """What the classes of `gdn_models.camera` share; use one of them."""

    config_kind = CameraGDNConfig
    config: CameraGDNConfig

    def _add_parameters(self, factory: dict[str, Any]) -> None:
        config, dim = self.config, self.config.dim
        self.q_proj_cam, self.k_proj_cam, self.v_proj_cam, self.out_proj_cam = (
            nn.Linear(dim, dim, **factory) for _ in range(4)
        )
        self.q_norm_cam = nn.RMSNorm(dim, config.norm_eps, **factory) if config.qk_norm else None
        self.k_norm_cam = nn.RMSNorm(dim, config.norm_eps, **factory) if config.qk_norm else None
        self.conv_q_cam, self.conv_k_cam, self.conv_v_cam = (
            None if layer is None else TemporalConv(dim, config.conv_size, **factory) for layer in self._convolutions()
        )

    def reset_parameters(self) -> None:
        """Set the initial values that the class lists: the camera branch adds nothing at first."""
        super().reset_parameters()
        for layer in self._camera_projections():
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.out_proj_cam.weight)
        nn.init.zeros_(self.out_proj_cam.bias)
        for norm in (self.q_norm_cam, self.k_norm_cam):
            if norm is not None:
                nn.init.ones_(norm.weight)
        for conv in self._camera_convolutions():
            if conv is not None:
                conv.reset_parameters()

    @torch.no_grad()
    def init_camera_from_main(self) -> None:
        """Copy projections, norms and convolutions of q, k and v into the camera branch; ``out_proj_cam`` stays.

        For a block whose main branch was trained without cameras: with ``out_proj_cam`` still 0 the block computes what
        it did, and the branch starts from features that are of use.
        """
        weights, bias = self.qkv.weight.chunk(3), self.qkv.bias
        biases = bias.chunk(3) if bias is not None else (0, 0, 0)
        for layer, weight, own in zip(self._camera_projections(), weights, biases, strict=True):
            layer.weight.copy_(weight)
            layer.bias.zero_().add_(own)
        for to, source in (
            (self.q_norm_cam, self.q_norm),
            (self.k_norm_cam, self.k_norm),
            *zip(self._camera_convolutions(), self._convolutions(), strict=True),
        ):
            if to is not None and source is not None:
                to.weight.copy_(source.weight)

    def init_state(
        self,
        batch: int,
        grid: Grid,
        *,
        camera: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GDNState:
        """Return the state of a stream that has read nothing: zeros.

        Args:
            batch: B.
            grid: (F, h, w) of the calls to come, which must have its h and w; F is not looked at.
            camera: the calls will be given cameras: all of them, or none.
            device: of the state; that of the parameters if None.
            dtype: of the convolutions' tails, that of the tokens; of the parameters if None. The matrices are fp32, or
                fp64 if this is.

        Raises:
            ValueError: ``batch`` or a size is negative, or ``dtype`` is not a floating one.
            TypeError: An argument is of the wrong Python type.
            NotImplementedError: The block reads the future, and has no form that streams.
        """
        if not isinstance(camera, bool):
            raise TypeError(f"camera must be a bool, got {type(camera).__name__}")
        state = super().init_state(batch, grid, device=device, dtype=dtype)
        if not camera:
            return state
        like = {"device": state.kv.device, "dtype": self.qkv.weight.dtype if dtype is None else dtype}
        tails = zero_tails(self._tail_shape(batch, grid[1] * grid[2]), self._tails_used(), **like)
        return state._replace(camera=CameraState(torch.zeros_like(state.kv), tails))

    @overload
    def forward(
        self, x: Tensor, grid: Grid, camera: Camera | None = None, *, chunk_starts: Sequence[int] | None = None,
        frame_valid: Tensor | None = None, state: None = None, partition: FramePartition | None = None,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, x: Tensor, grid: Grid, camera: Camera | None = None, *, chunk_starts: Sequence[int] | None = None,
        state: GDNState,
    ) -> tuple[Tensor, GDNState]: ...  # fmt: skip

    def forward(
        self,
        x: Tensor,
        grid: Grid,
        camera: Camera | None = None,
        *,
        chunk_starts: Sequence[int] | None = None,
        frame_valid: Tensor | None = None,
        state: GDNState | None = None,
        partition: FramePartition | None = None,
    ) -> Tensor | tuple[Tensor, GDNState]:
        """Mix the tokens of a clip, or of this rank's frames of it, seen by a camera or not.

        Args:
            x: ``[B, N, C]`` in the dtype of the parameters (any floating dtype under autocast), any strides; N = F*h*w,
                frame-major.
            grid: (F, h, w): frames of this rank, rows and columns of a frame's tokens.
            camera: ``[B, F, 20]`` poses and intrinsics of the local frames, or what `ray_transforms` made of them once
                for all blocks. None leaves the branch out, whose parameters then get no gradient: present in all ranks
                or in none (`keep_camera`), and in all calls of a stream or in none.
            chunk_starts: as in `FrameGDN`; for `CameraChunkCausalGDN` only.
            frame_valid: as in `FrameGDN`, of both branches.
            state: as in `FrameGDN`, of both branches.
            partition: as in `FrameGDN`.

        Returns:
            Tensor: ``[B, N, C]`` in the dtype of x; under autocast in that of the last projection. With a state: the
                tuple of that and the state after the last frame.

        Raises:
            ValueError: As in `FrameGDN`; a camera of another shape, dtype or device; a state whose camera part is
                missing or left over.
            TypeError: An argument is of the wrong Python type; as in `FrameGDN`, for the camera's norms too.
            NotImplementedError: As in `FrameGDN`; a camera that requires a gradient.
            RuntimeError: As in `FrameGDN`; a camera on some of the ranks only (found out when ranks first meet with or
                without one; in a graph of ``torch.compile`` only by the convolutions).

        Communication: with a context of several ranks one halo exchange for the convolutions of both branches (if
            ``conv_size > 1``) and one exchange of summaries per branch, and the same again in backward. Every rank
            must call this: yes, also one without frames.
        """
        clip = self._clip(x, grid, chunk_starts, frame_valid, state, partition, camera)
        if camera is None:
            return self._run(x, clip)
        return self._run_both(x, clip, camera)

    def _run_both(self, x: Tensor, clip: Clip, camera: Camera) -> Tensor | tuple[Tensor, GDNState]:
        """Compute what `forward` returns from checked arguments and a camera."""
        x, rays, rope = mask_tokens(x, clip), self._rays(camera, clip), self._rotation(clip, x.device)
        beta, decay = self._gates(x, clip)
        qkv, own, tails = self._convolve_both(x, clip)
        mixed, final = self._mix(qkv, beta, decay, clip, rope)
        seen, camera_kv = self._mix_camera(own, beta, decay, clip, rays, rope)
        y = self._project(x, mixed.flatten(2) + self.out_proj_cam(seen.flatten(2)), clip)
        if clip.state is None:
            return y
        assert final is not None
        assert camera_kv is not None
        after = CameraState(camera_kv, tails[1])
        return y, GDNState(final.kv, final.z, tails[0], after, clip.state.frames + clip.grid[0], clip.grid[1:])

    def _rays(self, camera: Camera, clip: Clip) -> RayTransforms:
        """Return the transforms of the local tokens; in invalid frames, which may hold anything, the identity."""
        rays = camera
        if not isinstance(rays, RayTransforms):
            rays = ray_transforms(rays, clip.grid, self.config.patch_size)
        if clip.frame_valid is None:
            return rays
        valid = clip.frame_valid.repeat_interleave(clip.grid[1] * clip.grid[2], 1)[..., None, None]
        identity = torch.eye(4, dtype=rays.world_to_ray.dtype, device=valid.device)
        return RayTransforms(*(torch.where(valid, transform, identity.to(transform.dtype)) for transform in rays))

    def _convolve_both(
        self, x: Tensor, clip: Clip
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], tuple[ConvTails, ConvTails]]:
        """Project and convolve both branches, in one exchange.

        Returns ``qkv [B, N, 3, H, D]``, the camera's q, k and v ``[B, N, H, D]``, and the tails of both in a stream.
        """
        config, (frames, rows, columns) = self.config, clip.grid
        batch, tokens, dim = x.shape
        qkv = self._project_qkv(x, clip)
        main = qkv.reshape(batch, frames, rows * columns, 3, dim).unbind(3)
        own = [
            mask_tokens(layer(x), clip).reshape(batch, frames, rows * columns, dim)
            for layer in self._camera_projections()
        ]
        layers = (*self._convolutions(), *self._camera_convolutions())
        given: tuple[Tensor | None, ...] | None = None
        if clip.state is not None:
            assert clip.state.camera is not None
            given = (*clip.state.conv, *clip.state.camera.conv)
        parts, tails = convolve_clip((*main, *own), layers, given, clip, self.direction.reads_future)
        if any(layer is not None for layer in layers):
            qkv = torch.stack(parts[:3], 3)
        heads = (batch, tokens, config.heads, config.head_dim)
        q, k, v = (part.reshape(heads) for part in parts[3:])
        main_tails, own_tails = (tails[0], tails[1], tails[2]), (tails[3], tails[4], tails[5])
        return qkv.reshape(batch, tokens, 3, *heads[2:]), (q, k, v), (main_tails, own_tails)

    def _mix_camera(
        self,
        own: tuple[Tensor, Tensor, Tensor],
        beta: Tensor,
        decay: Tensor,
        clip: Clip,
        rays: RayTransforms,
        rope: RotaryTables | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the camera's recurrence, here or over the ranks; ``[B, N, H, D]``, and the final state of a stream."""
        config, shard = self.config, clip.shard
        rope = None if rope is None else camera_rotary_tables(rope)
        operands = camera_operands(
            *own, rays, frames=clip.grid[0], rope=rope,
            q_norm_weight=None if self.q_norm_cam is None else self.q_norm_cam.weight,
            k_norm_weight=None if self.k_norm_cam is None else self.k_norm_cam.weight,
            k_scale=key_scale(config.key_scale, config.head_dim, clip.grid), norm_eps=config.norm_eps, impl=config.impl,
        )  # fmt: skip
        tensors = (operands.q, operands.k, operands.v, discounted_strength(beta, operands.inflation), decay)
        options: dict[str, Any] = {
            "direction": self.direction,
            "chunk_starts": clip.chunk_starts or None,
            "frame_valid": clip.frame_valid,
            "precision": config.precision,
            "impl": config.impl,
        }
        if shard.context is not None:
            result = cp_frame_gdn_numerator(*tensors, context=shard.context, partition=shard.partition, **options)
        else:
            if clip.state is not None:
                assert clip.state.camera is not None
                options |= {"initial_state": clip.state.camera.kv, "output_final_state": True}
            result = frame_gdn_numerator(*tensors, **options)
        seen = camera_output(result.numerator, rays, rope=rope, dtype=own[0].dtype, impl=config.impl)
        return seen, result.final_state

    def _clip(self, *call: Any) -> Clip:
        """Check every argument, and that all ranks have a camera or none: without one a branch exchanges nothing."""
        context = self.context
        if context is None or context.is_trivial or torch.compiler.is_compiling():
            return super()._clip(*call)
        given = "none" if call[6] is None else "one"
        rows = tuple(call[1][1:]) if isinstance(call[1], list | tuple) else call[1]
        further = (("(h, w) of grid", str(rows)), ("rope_theta", str(self.config.rope_theta)))
        device, check = self.proj.weight.device, lambda: self._checked(*call)
        return agree_on_call(type(self).__name__, context, device, check, (("camera", given),), further)

    def _checked(
        self,
        x: Tensor,
        grid: Grid,
        chunk_starts: Sequence[int] | None,
        frame_valid: Tensor | None,
        state: GDNState | None,
        partition: FramePartition | None,
        camera: Camera | None = None,
    ) -> Clip:
        """Check every argument without reading device data."""
        clip = super()._checked(x, grid, chunk_starts, frame_valid, state, partition)
        if camera is not None:
            choose_impl(self.config.impl, x.dtype, x.device, self.config.head_dim)
        if isinstance(camera, RayTransforms):
            for field, transform in camera._asdict().items():
                name = f"camera.{field}"
                checks.require_shape(name, transform, "B, N, 4, 4", (*x.shape[:2], 4, 4))
                checks.require_dtype(name, transform, (torch.float32, torch.float64))
                checks.require_device(name, transform, x.device, "x")
                if transform.requires_grad:
                    raise NotImplementedError(f"{name} must not require a gradient: cameras are not differentiated")
        elif camera is not None:
            check_camera(camera, x, clip.grid[0])
        if state is not None and (state.camera is None) != (camera is None):
            rule = "None: the stream began without" if camera is None else "a CameraState: the stream began with"
            raise ValueError(f"state.camera must be {rule} a camera")
        return clip

    def _layers_read(self) -> list[tuple[str, type[nn.Module]]]:
        norms = ("q_norm_cam", "k_norm_cam") if self.config.qk_norm else ()
        return [*super()._layers_read(), *((name, nn.RMSNorm) for name in norms)]

    def _check_camera_state(self, state: GDNState, x: Tensor, grid: Grid) -> None:
        camera = state.camera
        if camera is None:
            return
        if not isinstance(camera, CameraState):
            raise TypeError(f"state.camera must be a CameraState or None, got {type(camera).__name__}")
        checks.require_state(
            "state.camera.kv", camera.kv, "B, H, D, D", tuple(state.kv.shape), state.kv.dtype, x.device
        )  # fmt: skip
        shape = self._tail_shape(x.shape[0], grid[1] * grid[2])
        check_tails("state.camera.conv", camera.conv, self._tails_used(), shape, x)

    def _camera_projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj_cam, self.k_proj_cam, self.v_proj_cam

    def _camera_convolutions(self) -> tuple[TemporalConv | None, TemporalConv | None, TemporalConv | None]:
        return self.conv_q_cam, self.conv_k_cam, self.conv_v_cam
