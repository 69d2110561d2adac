"""Start ranks as processes on this machine, run functions in each, and bring back what they return.

`run_ranks` starts them for one function, `RankPool` for several, where starting takes long. Ranks are forked, which
takes a tenth of a second, or spawned where they use a GPU, and meet over gloo or NCCL in a temporary file, which needs
no port. A launch ends after a time limit whatever its ranks do, and the first traceback is the one that is shown.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo  # noqa: F401  imported before the fork: doing it in a child takes seconds
import torch.distributed as dist

T = TypeVar("T")
LIMIT = 60.0


class RankError(AssertionError):
    """A rank raised, died or did not finish; holds the first traceback."""


def run_ranks(
    size: int,
    worker: Callable[[int], T],
    *,
    limit: float = LIMIT,
    timeout: float = 30.0,
    method: str = "fork",
    backend: str = "gloo",
) -> list[T]:
    """Run ``worker(rank)`` on ``size`` ranks of a group and return their results in rank order.

    ``limit`` bounds the whole launch, ``timeout`` one collective of the group, in seconds. Ranks that use a GPU must be
    spawned (``method="spawn"``); the worker then is a function of an importable module. ``backend="nccl"`` gives each
    rank a GPU of its own.
    """
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        given = (size, worker, Path(folder) / "meeting", timeout, backend)
        processes, ends = _start(_child, given, size, method)
        try:
            _collect({end: rank for rank, end in enumerate(ends)}, results, time.monotonic() + limit, limit)
        finally:
            _stop(processes, 1.0 if len(results) == size else 0.0)
    return [results[rank] for rank in range(size)]


class RankPool:
    """Ranks that stay, for one function after another; they start anew after one has failed.

    Attributes:
        size: their number.
        device: ``"cuda"``, a GPU each, over NCCL; ``"cpu"`` over gloo.
    """

    def __init__(self, size: int, device: str = "cpu", *, timeout: float = 30.0) -> None:
        self.size, self.device = size, device
        self._timeout = timeout
        self._processes: list[Any] = []
        self._ends: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()
        self._starts = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close(1.0)
        self._folder.cleanup()

    def run(self, worker: Callable[[int], T], *, limit: float = LIMIT) -> list[T]:
        """Run ``worker(rank)`` on every rank and return their results in rank order.

        The worker is a function of an importable module, or a partial of one; ``limit`` bounds it, in seconds.
        """
        if not self._processes:
            self._starts += 1
            on_gpu = self.device == "cuda"
            meeting, backend = Path(self._folder.name) / f"meeting-{self._starts}", "nccl" if on_gpu else "gloo"
            given = (self.size, meeting, self._timeout, backend)
            self._processes, self._ends = _start(_stay, given, self.size, "spawn" if on_gpu else "fork")
        results: dict[int, Any] = {}
        try:
            for end in self._ends:
                with contextlib.suppress(OSError):  # that of a dead rank; collecting tells which
                    end.send(worker)
            _collect({end: rank for rank, end in enumerate(self._ends)}, results, time.monotonic() + limit, limit)
        finally:
            if len(results) < self.size:
                self._close(0.0)
        return [results[rank] for rank in range(self.size)]

    def _close(self, patience: float) -> None:
        for end in self._ends:
            if patience:
                with contextlib.suppress(OSError):
                    end.send(None)
        _stop(self._processes, patience)
        for end in self._ends:
            end.close()
        self._processes, self._ends = [], []


def _start(target: Callable[..., None], given: tuple[Any, ...], size: int, method: str) -> tuple[list[Any], list[Any]]:
    """Start a process per rank, with ``(rank, *given, end of a pipe)``; return them and our ends."""
    if method == "fork" and torch.cuda.is_initialized():
        raise RuntimeError("ranks are forked, which must not happen after CUDA was initialised")
    context: Any = multiprocessing.get_context(method)
    processes, ends = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(rank, *given, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    return processes, ends


def _stop(processes: list[Any], patience: float) -> None:
    """Wait for processes for some seconds each, then end them."""
    for process in processes:
        process.join(timeout=patience)
        if process.is_alive():
            process.kill()
            process.join()


def _collect(ends: dict[Connection, int], results: dict[int, Any], deadline: float, limit: float) -> None:
    while ends:
        ready = wait(list(ends), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(ends.values())} did not finish within {limit} s")
        for end in ready:
            rank = ends.pop(end)  # type: ignore[call-overload]
            try:
                failed, payload = end.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RankError(f"rank {rank} died") from None
            if failed:
                raise RankError(f"rank {rank} raised\n{payload}")
            results[rank] = torch.load(io.BytesIO(payload), weights_only=False)


def _child(
    rank: int, size: int, worker: Callable[[int], Any], meeting: Path, timeout: float, backend: str, end: Connection
) -> None:
    try:
        _join(rank, size, meeting, timeout, backend)
        end.send((False, _saved(worker(rank))))
        end.close()
        _leave(backend, rank)
    except BaseException:  # noqa: BLE001  whatever it is, the parent shows it
        with contextlib.suppress(OSError):
            end.send((True, traceback.format_exc()))


def _stay(rank: int, size: int, meeting: Path, timeout: float, backend: str, end: Connection) -> None:
    try:
        _join(rank, size, meeting, timeout, backend)
        while (worker := end.recv()) is not None:
            end.send((False, _saved(worker(rank))))
        _leave(backend, rank)
    except EOFError:  # the parent is gone
        pass
    except BaseException:  # noqa: BLE001  whatever it is, the parent shows it
        with contextlib.suppress(OSError):
            end.send((True, traceback.format_exc()))


def _join(rank: int, size: int, meeting: Path, timeout: float, backend: str) -> None:
    torch.set_num_threads(1)  # the threads of the parent did not survive the fork
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )  # fmt: skip


def _leave(backend: str, rank: int) -> None:
    dist.barrier(**({"device_ids": [rank]} if backend == "nccl" else {}))
    dist.destroy_process_group()


def _saved(result: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()
