"""The command: a table for assumed links, and one for the ranks that a launcher started."""

import os
import runpy
import socket
import sys

import pytest
import torch.distributed as dist
from ranks import run_ranks


def test_one_process_prints_the_assumed_links(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["cost_model", "--sizes", "2", "8", "--heads", "20"])
    runpy.run_module("gdn_cp.cost_model", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("(B=1, H=20, D=112, both directions)")
    assert lines[1:4] == [
        "nvlink: 15.0 us per message, 300.00 GB/s; us per map: fold 4.0, compose 8.0, advance 4.0",
        "  P =   2   32 / 22 / 33 -> chain",
        "  P =   8   137 / 149 / 99 -> all_gather",
    ]
    assert [line.split(":")[0] for line in lines[1::3]] == ["nvlink", "infiniband", "ethernet"]


@pytest.mark.ranks
def test_ranks_print_the_measured_link_once(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def worker(rank: int) -> str:
        from contextlib import redirect_stdout
        from io import StringIO

        from gdn_cp.cost_model.__main__ import main

        dist.barrier()  # a rank that leaves early breaks the connections that another is still making
        dist.destroy_process_group()
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        with redirect_stdout(StringIO()) as out:
            main(["--sizes", "2", "--width", "8", "--heads", "2"])
        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the launcher's to leave
        return out.getvalue()

    first, second = run_ranks(2, worker)
    assert second == ""
    assert first.splitlines()[1].startswith("measured over 2 ranks: ")
    assert first.splitlines()[2].startswith("  P =   2 ")
