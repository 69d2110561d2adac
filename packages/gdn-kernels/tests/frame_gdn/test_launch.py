"""What a launch remembers, with stand-ins for Triton's kernels: no device is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="launches are Triton's")
from gdn_kernels.frame_gdn import launch as module  # noqa: E402
from gdn_kernels.frame_gdn.launch import launch  # noqa: E402


class Compiled:
    """Counts how often it is launched, and with what."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launched.append((grid, *arguments[1:]))


class Kernel:
    """Compiles on every call, and says what was given."""

    arg_names = ("x_ptr", "y_ptr", "n", "eps", "D", "FLAG")

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **constants: Any) -> Compiled:
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return call


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(module, "JITFunction", Kernel)
    monkeypatch.setattr(module, "CompiledKernel", Compiled)
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel()


def first(index: int = 0) -> Any:
    return SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=index))


Y = torch.zeros(64)


def test_the_second_call_goes_to_what_the_first_compiled_with_constants_in_order(kernel: Kernel) -> None:
    launch(kernel, (4,), first(), Y, 48, 0.5, FLAG=True, D=8, num_warps=4)
    launch(kernel, (5, 2), first(), Y + 1, 80, 0.25, FLAG=True, D=8, num_warps=4)
    (compiled,) = kernel.compiled
    ((grid, y, *rest),) = compiled.launched
    assert grid == (5, 2, 1)
    assert torch.equal(y, Y + 1)
    assert rest == [80, 0.25, 8, True]


@pytest.mark.parametrize(
    "change",
    [
        {"y": Y[1:]}, {"y": Y.double()}, {"y": Y.bfloat16()}, {"n": 1}, {"n": 49}, {"n": 2**31}, {"n": -(2**31) - 16},
        {"D": 16}, {"FLAG": False}, {"num_warps": 8}, {"maxnreg": 128}, {"index": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_kernel_may_be_compiled_for_is_told_apart(kernel: Kernel, change: dict[str, Any]) -> None:
    """Alignment, dtype, an integer that is one, odd or wide; constants, compiler options, device."""
    for given in ({}, change, {}, change):
        call = {"y": Y, "n": 48, "D": 8, "FLAG": True, "num_warps": 4, "index": 0, **given}
        y, n, index = (call.pop(name) for name in ("y", "n", "index"))
        launch(kernel, (4,), first(index), y, n, 0.5, **call)
    one, other = kernel.compiled
    assert len(one.launched) == len(other.launched) == 1


def test_other_kernels_are_told_apart(kernel: Kernel) -> None:
    other = Kernel()
    for each in (kernel, other, kernel):
        launch(each, (4,), first(), Y, 48, 0.5, D=8, FLAG=True)
    assert len(kernel.compiled) == len(other.compiled) == 1


def test_off_the_gpu_every_call_is_the_kernel_s_own(kernel: Kernel) -> None:
    for _ in range(2):
        launch(kernel, (4,), Y, Y, 48, 0.5, D=8, FLAG=True)
    assert len(kernel.compiled) == 2
