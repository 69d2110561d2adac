"""The comparing helpers can fail, and name the worst index when they do."""

import pytest
import torch
from agreement import assert_all_close, assert_close, assert_same, assert_zero, error


def test_assert_close_fails_just_beyond_its_tolerance_and_names_the_worst_index() -> None:
    expected = torch.full((2, 3), 4.0, dtype=torch.float64)
    found = expected.clone()
    found[0, 1] += 1e-9
    found[1, 2] += 4e-9
    assert_close(found, expected, 1.01e-9)
    with pytest.raises(AssertionError, match=r"y: relative error 1\.000e-09 > 9\.900e-10, worst at \(1, 2\)"):
        assert_close(found, expected, 0.99e-9, "y")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_error_is_infinite_where_one_side_is_not_finite(value: float) -> None:
    assert error(torch.tensor([1.0, value]), torch.ones(2)) == float("inf")
    assert error(torch.ones(2), torch.tensor([1.0, value])) == float("inf")


def test_error_is_absolute_where_zero_is_expected() -> None:
    assert error(torch.tensor([0.0, 0.5]), torch.zeros(2)) == 0.5


def test_assert_close_never_passes_on_nan_or_on_another_shape() -> None:
    with pytest.raises(AssertionError, match=r"worst at \(0,\)"):
        assert_close(torch.tensor([float("nan")]), torch.zeros(1), 1e9)
    for shape in ((2, 1), (0,)):
        with pytest.raises(AssertionError, match="shape"):
            assert_close(torch.ones(shape), torch.ones(2), 1e9)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(1), torch.ones(0), 1e9)


def test_assert_all_close_wants_the_same_names_and_the_same_nones() -> None:
    one = torch.ones(1)
    assert_all_close({"a": one, "b": None}, {"a": one, "b": None}, 0.0)
    for found in ({"a": one}, {"a": one, "b": one}, {"a": None, "b": None}):
        with pytest.raises(AssertionError):
            assert_all_close(found, {"a": one, "b": None}, 1e9)
    with pytest.raises(AssertionError, match="a: relative error"):
        assert_all_close({"a": one + 1, "b": None}, {"a": one, "b": None}, 0.5)


def test_assert_same_sees_the_last_bit_and_the_dtype() -> None:
    one = torch.ones(2)
    assert_same(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
    with pytest.raises(AssertionError, match=r"first difference at \(1,\)"):
        assert_same(torch.nextafter(one, one * torch.tensor([1.0, 2.0])), one)
    with pytest.raises(AssertionError, match="float64"):
        assert_same(one.double(), one)


def test_assert_zero_refuses_what_is_small_missing_or_empty() -> None:
    assert_zero(torch.zeros(2))
    for wrong in (torch.tensor([0.0, 1e-45]), torch.zeros(0), None):
        with pytest.raises(AssertionError):
            assert_zero(wrong)
