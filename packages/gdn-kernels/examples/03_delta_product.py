"""Rotate three stored values within one token: two corrections of the state do it, one can only swap two of them."""

import torch

from gdn_kernels import gated_delta_product, l2_normalize

torch.manual_seed(0)
width = 4
stored = torch.randn(1, 1, width, width)  # row i is what key channel i holds

# I - 2 u'u with u along e0 - e1 swaps channels 0 and 1; one along e1 - e2 swaps 1 and 2; both rotate three channels
keys = torch.zeros(1, 2, 1, width)
keys[0, 0, 0, :2] = torch.tensor([1.0, -1.0])
keys[0, 1, 0, 1:3] = torch.tensor([1.0, -1.0])
result = gated_delta_product(
    torch.eye(width)[None, :1, None],  # reads channel 0
    l2_normalize(keys),
    torch.zeros(1, 2, 1, width),
    torch.full((1, 2, 1), 2.0),
    num_householder=2,
    scale=1.0,
    initial_state=stored,
    output_final_state=True,
)

rotated = stored[:, :, [1, 2, 0, 3]]
difference = (result.final_state - rotated).abs().max() / rotated.abs().max()
print(f"largest relative difference from the rotated values: {difference:.1e} (should be below 1e-5)")
