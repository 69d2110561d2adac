"""Launches that do not ask Triton again what it found out the last time.

Binding and specialising some forty arguments on the host takes longer than a short clip takes on the device. What a
compiled kernel depends on is little: dtypes and alignments of pointers, ranges of integers, and the constants.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch ``kernel[grid](*arguments, **constants)`` on the current device.

    Args:
        kernel: a Triton kernel; anything but a compiled one is called as it is, as in the interpreter.
        grid: one to three sizes.
        *arguments: tensors, ints and floats for the first parameters; the first is a tensor.
        **constants: values of the constexpr parameters, all of them, and compiler options.
    """
    if not isinstance(kernel, JITFunction) or not arguments[0].is_cuda:
        kernel[grid](*arguments, **constants)
        return
    key = (id(kernel), arguments[0].device.index, *constants.items(), *map(_specialization, arguments))
    known = _compiled.get(key)
    if known is not None:
        compiled, tail = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *tail)
        return
    compiled = kernel[grid](*arguments, **constants)
    if isinstance(compiled, CompiledKernel):
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _specialization(x: Any) -> Any:
    """Return all that Triton may compile for in an argument; a finer distinction than it makes costs nothing."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15
    if isinstance(x, int):
        return x & 15 if -(2**31) <= x < 2**31 else -1 - (x & 15), x == 1
    return type(x)
