"""The clips that figures are quoted for: frames, tokens per frame, heads and channels of models in use."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """One clip, and what it is."""

    batch: int
    frames: int
    spatial: int
    heads: int
    width: int
    what: str

    @property
    def tokens(self) -> int:
        """Tokens of a batch row, N = F * S."""
        return self.frames * self.spatial

    def forward_bytes(self, element_size: int) -> int:
        """Return the bytes a forward must move once: qkv, gates and tables read, the output written."""
        return self._operand(4, element_size) + self._small()

    def backward_bytes(self, element_size: int) -> int:
        """Return the bytes a backward must move once: qkv, output and its gradient read, gradients written."""
        return self._operand(8, element_size) + 2 * self._small()

    def _operand(self, count: int, element_size: int) -> int:
        return count * self.batch * self.tokens * self.heads * self.width * element_size

    def _small(self) -> int:
        gates = self.batch * self.heads * (self.tokens + self.frames)
        return 4 * (gates + self.tokens * self.width)  # fp32; cos and sin are N x D/2 each


def _wm(frames: int, what: str) -> Shape:
    return Shape(1, frames, 880, 20, 112, what)


SHAPES = {
    "wm_121": _wm(121, "SANA-WM, 720p, 961 video frames"),
    "wm_41": _wm(41, "SANA-WM, 720p, 321 video frames"),
    "wm_61": _wm(61, "largest shard of 121 frames on two ranks"),
    "wm_31": _wm(31, "largest shard of 121 frames on four ranks; 241 video frames"),
    "wm_80": _wm(80, "the long row of comparisons"),
    "wm_21": _wm(21, "the middle row of comparisons"),
    "wm_43": _wm(43, "distillation clip"),
    "tune_11": Shape(1, 11, 920, 20, 112, "tuning shape of the published kernels"),
    "tune_11_b4": Shape(4, 11, 920, 20, 112, "tuning shape, four clips"),
    "tune_11_b8": Shape(8, 11, 920, 20, 112, "tuning shape, eight clips"),
    **{f"tune_{f}": Shape(1, f, 920, 20, 112, "tuning shape, other lengths") for f in (3, 5, 6, 14, 17, 20)},
    "stream_4": _wm(4, "first streaming step"),
    "stream_3": _wm(3, "following streaming steps"),
    "v2v_122": _wm(122, "SANA-Streaming video to video, full clip"),
    "v2v_11": _wm(11, "SANA-Streaming video to video, student window"),
    "camera_11": Shape(1, 11, 920, 20, 128, "camera branch"),
    "camera_11_h32": Shape(1, 11, 920, 32, 128, "camera branch, 32 heads"),
    "camera_11_b4": Shape(4, 11, 920, 20, 128, "camera branch, four clips"),
    "p480_11": Shape(1, 11, 390, 20, 112, "480 x 832, the smallest frames of the family"),
    "tiny": Shape(1, 6, 4, 2, 32, "integration tests"),
}
HEADLINE = ("tune_11", "wm_21", "wm_80")
