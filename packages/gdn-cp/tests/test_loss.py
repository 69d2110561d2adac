"""A loss tied to outputs it does not use."""

import torch

from gdn_cp import join_backward


def test_outputs_get_zeros_and_the_loss_keeps_its_value():
    """A NaN in an output does not reach the loss, as adding 0 times the output would."""
    x = torch.tensor(2.0, requires_grad=True)
    output = torch.full((3,), torch.nan, requires_grad=True)
    joined = join_backward(3 * x, output)
    assert joined.item() == 6.0
    joined.backward()
    assert x.grad.item() == 3.0
    assert output.grad.tolist() == [0.0, 0.0, 0.0]
