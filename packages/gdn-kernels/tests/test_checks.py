"""Checks on their own: what passes, what each raise says, and that none of them reads a tensor's data."""

import pytest
import torch

from gdn_kernels import Direction, FrameState, Impl, Precision, checks

CPU = torch.device("cpu")
X = torch.zeros(2, 3)


def test_tensor_checks_let_the_right_ones_pass() -> None:
    checks.require_tensor("x", X)
    checks.require_rank("x", X, "A, B")
    checks.require_shape("x", X, "A, B", (2, 3))
    checks.require_dtype("x", X, (torch.float16, torch.float32))
    checks.require_device("x", X, CPU, "y")
    checks.require_state("x", X, "A, B", (2, 3), torch.float32, CPU)
    state = FrameState(torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4))
    checks.require_frame_state("s", state, 2, 3, 4, torch.float32, CPU)


@pytest.mark.parametrize(
    "check, kind, message",
    [
        (lambda: checks.require_tensor("x", 3), TypeError, "^x must be a torch.Tensor, got int$"),
        (lambda: checks.require_rank("x", "y", "A"), TypeError, "^x must be a torch.Tensor, got str$"),
        (lambda: checks.require_rank("x", X, "A, B, C"), ValueError, r"^x must have shape \[A, B, C\], got \[2, 3\]$"),
        (lambda: checks.require_shape("x", None, "A", (2,)), TypeError, "^x must be a torch.Tensor, got NoneType$"),
        (lambda: checks.require_shape("x", X, "A, B", (3, 2)), ValueError, r"\[A, B\] = \[3, 2\], got \[2, 3\]$"),
        (lambda: checks.require_dtype("x", X, (torch.half,)), ValueError, "^x must have dtype float16, got float32$"),
        (
            lambda: checks.require_device("x", X.to("meta"), CPU, "y"),
            ValueError,
            r"^x must be on the device of y \(cpu\)",
        ),
        (
            lambda: checks.require_state("x", X, "A", (2,), X.dtype, CPU),
            ValueError,
            r"^x must have shape \[A\] = \[2\]",
        ),
        (
            lambda: checks.require_state("x", X, "A, B", (2, 3), torch.half, CPU),
            ValueError,
            "^x must have dtype float16",
        ),
        (
            lambda: checks.require_frame_state("s", (X, X), 2, 3, 4, X.dtype, CPU),
            TypeError,
            r"^s must be a FrameState\(kv, z\), got tuple$",
        ),
        (
            lambda: checks.require_frame_state("s", FrameState(X, X), 2, 3, 4, X.dtype, CPU),
            ValueError,
            r"^s\.kv must have shape \[B, H, D, D\] = \[2, 3, 4, 4\], got \[2, 3\]$",
        ),
    ],
)
def test_tensor_checks_say_what_is_wrong(check: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        check()


def test_numbers_come_back_as_floats() -> None:
    assert checks.require_positive("x", 2) == 2.0
    assert isinstance(checks.require_positive("x", 2), float)
    assert checks.require_non_negative("x", 0) == 0.0
    assert isinstance(checks.require_non_negative("x", 0), float)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, -float("inf")])
def test_numbers_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="^x must be a finite number > 0, got"):
        checks.require_positive("x", value)
    with pytest.raises(ValueError, match="^x must be a finite number >= 0, got"):
        checks.require_non_negative("x", value)
    with pytest.raises(ValueError, match="^x must be a finite number > 0, got 0$"):
        checks.require_positive("x", 0)


@pytest.mark.parametrize("value, shown", [(True, "bool True"), ("1", "str '1'"), (None, "NoneType"), (X, "Tensor")])
def test_what_is_no_number_is_refused(value: object, shown: str) -> None:
    for check in (checks.require_positive, checks.require_non_negative):
        with pytest.raises(TypeError, match=f"^x must be a number, got {shown}$"):
            check("x", value)


@pytest.mark.parametrize("kind", [Direction, Impl, Precision])
def test_options_come_by_member_or_by_name(kind: type) -> None:
    converters = {Direction: checks.as_direction, Impl: checks.as_impl}
    convert = converters.get(kind, lambda value: checks.as_precision(value, torch.float32))
    for member in kind:
        assert convert(member) is member
        assert convert(member.value) is member
    name = kind.__name__.lower()
    with pytest.raises(ValueError, match=f"^{name} must be one of '.*', got 'sideways'$"):
        convert("sideways")
    with pytest.raises(TypeError, match=f"^{name} must be a str, got float 1.5$"):
        convert(1.5)


def test_precision_has_published_numbers_and_a_default_for_each_dtype() -> None:
    numbered = [checks.as_precision(number, torch.float32) for number in (0, 1, 2)]
    assert numbered == [Precision.BF16, Precision.TF32, Precision.IEEE]
    defaults = {dtype: checks.as_precision(None, dtype) for dtype in checks.FLOATING}
    assert [d for d, p in defaults.items() if p is Precision.BF16] == [torch.float16, torch.bfloat16]
    assert [d for d, p in defaults.items() if p is Precision.IEEE] == [torch.float32, torch.float64]
    with pytest.raises(ValueError, match="^precision must be one of 'bf16', 'tf32', 'ieee' or 0, 1, 2, got -1$"):
        checks.as_precision(-1, torch.float32)
    with pytest.raises(TypeError, match="^precision must be a str, got bool True$"):
        checks.as_precision(True, torch.float32)


@pytest.mark.parametrize(
    "value, frames, expected",
    [
        (None, 5, ()),
        ((), 5, ()),
        ((0,), 5, ()),
        ((0, 2, 4), 5, (2, 4)),
        ([1, 3], 5, (1, 3)),
        ((0,), 0, ()),
        ((), 0, ()),
    ],
)
def test_chunk_starts_become_interior_starts(value: object, frames: int, expected: tuple[int, ...]) -> None:
    assert checks.as_chunk_starts(value, frames) == expected


@pytest.mark.parametrize(
    "value, frames, kind, message",
    [
        (torch.tensor([0, 1]), 5, TypeError, "^chunk_starts must be a tuple of ints or None, got Tensor$"),
        (range(0, 4, 2), 5, TypeError, "got range$"),
        ((0, 1.5), 5, TypeError, "must be a tuple of ints"),
        ((0, True), 5, TypeError, "must be a tuple of ints"),
        ("01", 5, TypeError, "got str '01'$"),
        (3, 5, TypeError, "got int 3$"),
        ((0, 3, 1), 5, ValueError, r"^chunk_starts must be strictly increasing, got \(0, 3, 1\)$"),
        ((1, 1), 5, ValueError, "strictly increasing"),
        ((-1, 1), 5, ValueError, r"^chunk_starts must lie in 0 ... F - 1 = 4, got \(-1, 1\)$"),
        ((0, 5), 5, ValueError, r"must lie in 0 ... F - 1 = 4, got \(0, 5\)$"),
        ((1,), 0, ValueError, r"must lie in 0 ... F - 1 = 0, got \(1,\)$"),
    ],
)
def test_chunk_starts_that_make_no_sense_are_refused(
    value: object, frames: int, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        checks.as_chunk_starts(value, frames)
