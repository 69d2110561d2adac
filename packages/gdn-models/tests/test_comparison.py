"""The comparing helpers can fail."""

import pytest
import torch
from comparison import assert_close, assert_gradients_close, error, gradients


def test_assert_close_fails_just_beyond_its_tolerance_and_names_the_index() -> None:
    expected = torch.ones(2, 3, dtype=torch.float64)
    found = expected.clone()
    found[1, 2] += 1e-9
    assert_close(found, expected, 1.01e-9)
    with pytest.raises(AssertionError, match=r"y: relative error 1\.000e-09 > 9\.900e-10, worst at \(1, 2\)"):
        assert_close(found, expected, 0.99e-9, "y")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_error_of_a_value_that_is_not_finite_is_infinite(value: float) -> None:
    assert error(torch.tensor([1.0, value]), torch.ones(2)) == float("inf")


def test_assert_close_refuses_another_shape() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(2, 1), torch.ones(2), 1.0)


def test_gradients_names_what_is_missing() -> None:
    layer = torch.nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    assert_gradients_close(gradients(layer), {"weight": torch.ones(1, 2), "bias": torch.ones(1)}, 0.0)
    with pytest.raises(AssertionError, match="gradient of bias"):
        assert_gradients_close(gradients(layer), {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, 0.5)
    layer.bias.grad = None
    with pytest.raises(AssertionError, match=r"no gradient for \['bias'\]"):
        gradients(layer)
