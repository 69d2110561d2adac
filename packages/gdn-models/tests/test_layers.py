"""Layers whose weights are read: what may stand in their place, and what would be left out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gdn_models import BidirectionalGDN, CameraFrameGDN, FrameGDN, GatedDeltaProduct
from gdn_models.layers import require_plain

C, H, GRID = 16, 2, (3, 2, 1)


class Adapter(nn.Module):
    """A wrapper as adapter libraries make them: it shows the weight of what it wraps and adds to its output."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    @property
    def weight(self) -> Tensor:
        return self.wrapped.weight

    @property
    def bias(self) -> Tensor:
        return self.wrapped.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.wrapped(x) + 1


class OwnForward(nn.Linear):
    """An adapter that is a Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def call(block: nn.Module) -> Tensor:
    seen = (torch.ones(1, 3, 20),) if isinstance(block, CameraFrameGDN) else ()
    return block(torch.ones(1, 6, C), GRID, *seen)


@pytest.mark.parametrize(
    ("cls", "name", "kind"),
    [
        *((cls, name, "Linear") for cls in (FrameGDN, CameraFrameGDN) for name in ("beta_proj", "gate_proj")),
        *((cls, name, "RMSNorm") for cls in (BidirectionalGDN, CameraFrameGDN) for name in ("q_norm", "k_norm")),
        *((CameraFrameGDN, name, "RMSNorm") for name in ("q_norm_cam", "k_norm_cam")),
    ],
)
def test_a_block_refuses_wrappers_whose_forward_would_not_run(cls: type[nn.Module], name: str, kind: str) -> None:
    block = cls(dim=C, heads=H)
    plain = getattr(block, name)
    for other in (Adapter(plain), nn.Identity(), None):
        setattr(block, name, other)
        message = f"^{name} must be a torch.nn.{kind} whose weight can be read, got {type(other).__name__}$"
        with pytest.raises(TypeError, match=message):
            call(block)
    setattr(block, name, plain)
    call(block)
    plain.forward = lambda x: x  # as adapters that leave the layer where it is
    with pytest.raises(TypeError, match=f"^{name} must be .*, got {kind} with a forward of its own$"):
        call(block)


@pytest.mark.parametrize("name", ["qkv", "proj", "output_gate"])
def test_layers_that_are_called_may_be_wrapped(name: str) -> None:
    block = FrameGDN(dim=C, heads=H)
    before = call(block)
    own = OwnForward(C, getattr(block, name).out_features, bias=getattr(block, name).bias is not None)
    own.load_state_dict(getattr(block, name).state_dict())
    setattr(block, name, own)
    assert not torch.allclose(call(block), before)


def test_a_block_without_norms_has_none_to_read() -> None:
    block = CameraFrameGDN(dim=C, heads=H, qk_norm=False)
    assert torch.isfinite(call(block)).all()


def test_the_delta_product_refuses_another_norm() -> None:
    layer = GatedDeltaProduct(dim=C, heads=H, head_dim=8)
    layer.o_norm = nn.LayerNorm(16)
    with pytest.raises(TypeError, match="^o_norm must be a torch.nn.RMSNorm whose weight can be read, got LayerNorm$"):
        layer(torch.ones(1, 3, C))


def test_a_subclass_is_plain_if_its_forward_is() -> None:
    class Named(nn.Linear):
        pass

    require_plain("layer", Named(2, 2), nn.Linear)
    with pytest.raises(TypeError, match="^layer must be .*, got OwnForward with a forward of its own$"):
        require_plain("layer", OwnForward(2, 2), nn.Linear)


def test_parametrisations_are_seen_by_whoever_reads_the_weight() -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    block = FrameGDN(dim=C, heads=H)
    nn.init.ones_(block.beta_proj.weight)
    halved = copy.deepcopy(block)
    with torch.no_grad():
        halved.beta_proj.weight.div_(2)
    parametrize.register_parametrization(block.beta_proj, "weight", Half())
    assert torch.equal(call(block), call(halved))
