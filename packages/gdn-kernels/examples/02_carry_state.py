"""Carry the state from call to call: a clip that arrives frame by frame gives what the whole clip gives."""

import torch

from gdn_kernels import frame_gdn, rotary_tables

torch.manual_seed(0)
frames, rows, columns, heads, width = 8, 3, 4, 2, 12
spatial = rows * columns
qkv = torch.randn(1, frames * spatial, 3, heads, width)
beta, decay = torch.rand(1, heads, frames, spatial), torch.rand(1, heads, frames)
options = {"k_scale": (width * spatial) ** -0.5, "output_final_state": True}

whole = frame_gdn(qkv, beta, decay, rope=rotary_tables((frames, rows, columns), width), **options)

state, outputs = None, []
for f in range(frames):
    tokens = slice(f * spatial, (f + 1) * spatial)
    rope = rotary_tables((1, rows, columns), width, frame_offset=f)
    gates = beta[:, :, f : f + 1], decay[:, :, f : f + 1]
    part = frame_gdn(qkv[:, tokens], *gates, rope=rope, initial_state=state, **options)
    state, outputs = part.final_state, [*outputs, part.output]

difference = (torch.cat(outputs, dim=1) - whole.output).abs().max() / whole.output.abs().max()
print(f"largest relative difference: {difference:.1e} (should be below 1e-5)")
