"""Start ranks as processes on this machine, run a function in each, and bring back what they return.

Ranks are forked, which takes a tenth of a second, or spawned where they use a GPU, and meet over gloo in a temporary
file, which needs no port. A launch ends after a time limit whatever its ranks do, and the first traceback is the one
that is shown.
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
    if method == "fork" and torch.cuda.is_initialized():
        raise RuntimeError("ranks are forked, which must not happen after CUDA was initialised")
    context: Any = multiprocessing.get_context(method)
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        processes, ends = [], {}
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(rank, size, worker, meeting, timeout, theirs, backend), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            ends[ours] = rank
        try:
            _collect(ends, results, time.monotonic() + limit, limit)
        finally:
            for process in processes:
                process.join(timeout=1.0 if len(results) == size else 0.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [results[rank] for rank in range(size)]


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
    rank: int, size: int, worker: Callable[[int], Any], meeting: Path, timeout: float, end: Connection, backend: str
) -> None:
    torch.set_num_threads(1)  # the threads of the parent did not survive the fork
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, init_method=f"file://{meeting}", rank=rank, world_size=size,
            timeout=datetime.timedelta(seconds=timeout),
        )  # fmt: skip
        buffer = io.BytesIO()
        torch.save(worker(rank), buffer)
        end.send((False, buffer.getvalue()))
        end.close()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  whatever it is, the parent shows it
        with contextlib.suppress(OSError):
            end.send((True, traceback.format_exc()))
