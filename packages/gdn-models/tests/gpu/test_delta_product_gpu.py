"""The Gated Delta Product layer on a CUDA device: on FLA's kernels, against itself in fp64, and against FLA's layer."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_models import GatedDeltaProduct

# warnings of FLA, and of Triton when it compiles FLA's kernels, are not ours
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if importlib.util.find_spec("fla") is None:
    pytest.skip("needs the package fla-core", allow_module_level=True)


C, T = 128, 150
OPTIONS: dict[str, Any] = {"dim": C, "heads": 2, "head_dim": 64, "expand_v": 1.0}
# relative Frobenius against fp64 on the same weights, beyond what the torch backend loses: that rounds only what enters
# and leaves the operation, FLA also factors, new values and chunk states, for which these are the operation's bounds
OUTPUT, GRADIENT = 4e-3, 1.5e-2


def make(backend: str, **options: Any) -> GatedDeltaProduct:
    torch.manual_seed(0)
    layer = GatedDeltaProduct(**OPTIONS, **options, backend=backend)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2.0)  # the initial projections hardly tell tokens apart
    return layer.to("cuda", torch.bfloat16)


def train(layer: GatedDeltaProduct, x: Tensor, cu_seqlens: tuple[int, ...] | None) -> dict[str, Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x, cu_seqlens=cu_seqlens)
    y.backward(torch.cos(torch.arange(y.numel(), device="cuda").view(y.shape)).to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in layer.named_parameters()}}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def cancellation(exact: GatedDeltaProduct, x: Tensor, cu_seqlens: tuple[int, ...] | None) -> float:
    """Return how much larger than their sum the tokens' shares of the gradient of ``A_log`` are, taken without sign.

    Decays have gradients of both signs: what rounding does to each is not small beside what is left of them.
    """
    kept: list[Tensor] = []
    decay = exact._log_decay

    def keep(x: Tensor) -> Tensor:
        kept.append(decay(x))
        kept[0].retain_grad()
        return kept[0]

    exact._log_decay = keep
    train(exact, x, cu_seqlens)
    del exact._log_decay
    shares = kept[0].grad * kept[0].detach()
    return float(shares.abs().sum((0, 1)).norm() / shares.sum((0, 1)).norm())


def tokens(rows: int = 1) -> Tensor:
    return torch.randn(rows, T, C, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("cu_seqlens", [None, (0, 70, 70, T)], ids=["rows", "packed"])
@pytest.mark.parametrize("options", [{}, {"value_heads": 4, "num_householder": 3}, {"forget_gate": False}], ids=str)
def test_layer_on_fla_is_as_near_to_fp64_as_its_kernels_are(
    options: dict[str, Any], cu_seqlens: tuple[int, ...] | None
) -> None:
    layer, plain = make("auto", **options), make("torch", **options)
    exact = copy.deepcopy(plain).double()
    x = tokens()
    found, torchs = train(layer, x, cu_seqlens), train(plain, x, cu_seqlens)
    reference = train(exact, x.double(), cu_seqlens)
    assert not torch.equal(found["y"], torchs["y"])  # it did run on the kernels
    bounds = dict.fromkeys(reference, GRADIENT) | {"y": OUTPUT}
    if layer.config.forget_gate:
        summed = cancellation(exact, x.double(), cu_seqlens) * GRADIENT
        bounds |= {"A_log": summed, "dt_bias": summed}
    for name, value in reference.items():
        lost, allowed = error(found[name], value), error(torchs[name], value)
        assert lost <= allowed + bounds[name], f"{name}: {lost:.1e}, torch {allowed:.1e}, bound {bounds[name]:.1e}"


def test_streaming_on_fla_equals_the_single_call() -> None:
    layer = make("fla")
    x = tokens(2)
    with torch.no_grad():
        whole, state, parts = layer(x), layer.init_state(2), []
        for part in torch.split(x, [70, 1, 79], 1):
            y, state = layer(part, state=state)
            parts.append(y)
    assert error(torch.cat(parts, 1), whole.double()) <= 2 * OUTPUT  # other chunks, so other roundings on either side


def published_layer() -> Any:
    """Return FLA's layer, which needs no package but FLA's; those beside it would need transformers."""
    folder = Path(importlib.util.find_spec("fla").submodule_search_locations[0]) / "layers"
    if not (folder / "gated_deltaproduct.py").is_file():
        pytest.skip("needs the package flash-linear-attention")
    importlib.import_module("fla")  # takes in what it can
    for name in [name for name in sys.modules if name == "fla.layers" or name.startswith("fla.layers.")]:
        del sys.modules[name]  # what an import without transformers has left behind
    package = types.ModuleType("fla.layers")
    package.__path__ = [str(folder)]
    sys.modules["fla.layers"] = package
    return importlib.import_module("fla.layers.gated_deltaproduct").GatedDeltaProduct


@pytest.mark.parametrize("options", [{}, {"value_heads": 4, "num_householder": 3}, {"forget_gate": False}], ids=str)
def test_states_move_between_this_layer_and_the_published_one(options: dict[str, Any]) -> None:
    ours = make("fla", **options)
    names = {"dim": "hidden_size", "heads": "num_heads", "value_heads": "num_v_heads", "forget_gate": "use_forget_gate"}
    given = {names.get(name, name): value for name, value in {**OPTIONS, **options}.items()}
    theirs = published_layer()(**given).to("cuda", torch.bfloat16)
    for name in ("A_log", "dt_bias") if "forget_gate" not in options else ():
        getattr(theirs, name).data = getattr(theirs, name).data.float()  # as ours are kept
    theirs.load_state_dict(ours.state_dict(), strict=True)
    other = make("fla", **options)
    other.load_state_dict(theirs.state_dict(), strict=True)
    x = tokens(2)
    with torch.no_grad():
        expected = theirs.train()(x)[0]
        found = ours(x)
        assert torch.equal(other(x), found)
    exact = copy.deepcopy(make("torch", **options)).double()
    with torch.no_grad():
        y = exact(x.double())
    lost, published = error(found, y), error(expected, y)
    assert lost <= max(1.25 * published, OUTPUT), f"{lost:.1e}, published {published:.1e}"
    assert error(found, expected.double()) <= lost + published
