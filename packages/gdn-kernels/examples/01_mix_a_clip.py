"""Mix the tokens of a clip: where all tokens have the same value, every one of them reads that value back.

A frame-wise gated delta network averages values, with weights that depend on keys and gates. Weights that add up to one
leave a common value alone.
"""

import torch

from gdn_kernels import frame_gdn

torch.manual_seed(0)
frames, spatial, heads, width = 6, 20, 2, 12

qkv = torch.randn(1, frames * spatial, 3, heads, width)  # queries, keys and values of every token
qkv[:, :, 2] = 7.0
beta = torch.rand(1, heads, frames, spatial)  # how strongly a token writes
decay = torch.rand(1, heads, frames)  # what a frame leaves of the memory

result = frame_gdn(
    qkv,
    beta,
    decay,
    q_norm_weight=torch.ones(heads * width),
    k_norm_weight=torch.ones(heads * width),
    k_scale=(width * spatial) ** -0.5,
    direction="bidirectional",
)
print(f"mean output of {tuple(result.output.shape)}: {result.output.mean():.3f} (should be 7.000)")
