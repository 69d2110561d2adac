"""Blocks of frame-wise gated delta networks: causal, bidirectional and chunk-causal."""

from __future__ import annotations

from gdn_kernels import Direction
from gdn_models.block import FrameGDNBlock


class FrameGDN(FrameGDNBlock):
    """Causal block: a frame reads itself and the frames before it.

        beta = sigmoid(beta_proj(x))            decay = exp(-exp(A_log) softplus(gate_proj(mean_s x) + dt_bias))
        q, k, v = qkv(x)                        k = conv_k(k)  over frames  (q and v too with conv_qv)
        mixed = frame_gdn(q, k, v, beta, decay) with RMSNorm, ReLU, key scale and rotation inside
        y = proj(mixed * SiLU(output_gate(x)))

    Parameters, their shapes and what `reset_parameters` sets them to:

    ====================================  ==================  ========================================================
    ``qkv.weight`` (``.bias``)            [3C, C] ([3C])      Xavier uniform (0; only with ``qkv_bias``)
    ``proj.weight``, ``.bias``            [C, C], [C]         Xavier uniform, 0
    ``q_norm.weight``, ``k_norm.weight``  [C]                 1; absent without ``qk_norm``
    ``beta_proj.weight``, ``.bias``       [H, C], [H]         0, 5: beta = 0.9933
    ``gate_proj.weight``, ``.bias``       [H, C], [H]         0, 0
    ``A_log``, ``dt_bias``                [H], at least fp32  0, -5: decay = 0.9933; no weight decay
    ``output_gate.weight``, ``.bias``     [C, C], [C]         0, 1.2785: the gate is 1; absent without ``output_gate``
    ``conv_k.weight``                     [C, 1, K]           the identity; absent with ``conv_size=0``
    ``conv_q.weight``, ``conv_v.weight``  [C, 1, K]           the identity; only with ``conv_qv``
    ====================================  ==================  ========================================================

    The three classes have the same keys, which are those of the published SANA-WM blocks (NVlabs/Sana).

    Example:
        >>> FrameGDN(dim=16, heads=2)(torch.rand(1, 12, 16), (3, 2, 2)).shape
        torch.Size([1, 12, 16])
    """

    direction = Direction.FORWARD


class BidirectionalGDN(FrameGDNBlock):
    """Bidirectional block: a frame reads all frames, its own once.

    Equation and parameters are those of `FrameGDN`, with the recurrence run both ways over one division and a symmetric
    convolution.

    Example:
        >>> BidirectionalGDN(dim=16, heads=2)(torch.rand(1, 12, 16), (3, 2, 2)).shape
        torch.Size([1, 12, 16])
    """

    direction = Direction.BIDIRECTIONAL
    can_stream = False


class ChunkCausalGDN(FrameGDNBlock):
    """Chunk-causal block: a frame reads every frame before the end of its chunk.

    Equation and parameters are those of `FrameGDN`; the forward scan crosses chunks, the reverse scan and the taps of
    the convolution that look ahead stay inside one. Without chunk starts it computes what `BidirectionalGDN` computes,
    with chunks of one frame what `FrameGDN` does.

    Example:
        >>> from gdn_models import chunk_schedule
        >>> block = ChunkCausalGDN(dim=16, heads=2)
        >>> block(torch.rand(1, 28, 16), (7, 2, 2), chunk_starts=chunk_schedule(7, 3)).shape
        torch.Size([1, 28, 16])
    """

    direction = Direction.BIDIRECTIONAL
    has_chunks = True
