"""Compare tensors relative to the largest entry, and say where they differ most."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference over the largest entry expected; inf where one of them is not finite."""
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    difference = (found.detach().double() - expected.detach().double()).abs().max()
    scale = expected.detach().double().abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.nan_to_num(difference / scale, nan=torch.inf, posinf=torch.inf))


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str = "tensor") -> None:
    """Fail, with the worst index, unless `error` is within ``tolerance``."""
    worst = error(found, expected)
    if worst > tolerance:
        difference = (found.detach().double() - expected.detach().double()).abs().nan_to_num(torch.inf, torch.inf)
        where = tuple(int(i) for i in torch.unravel_index(difference.argmax(), found.shape))
        raise AssertionError(
            f"{name}: relative error {worst:.3e} > {tolerance:.3e}, worst at {where}: "
            f"{found[where].item():.6e}, expected {expected[where].item():.6e}"
        )


def assert_gradients_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Compare gradients name by name; all expected ones must be there."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, tolerance, f"gradient of {name}")


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every parameter; none may be missing."""
    missing = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    assert not missing, f"no gradient for {missing}"
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def randomize(module: nn.Module, seed: int = 0, scale: float = 0.3) -> None:
    """Add noise to every parameter, so that nothing is an identity, a zero or a one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith(("beta_proj.bias", "dt_bias")):
                parameter.zero_()  # gates around one half rather than saturated
            parameter.add_(noise.to(parameter.dtype), alpha=scale)
