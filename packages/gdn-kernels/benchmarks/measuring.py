"""What the benchmarks of the packages share: shapes by name, CUDA graphs, tables, and what a figure is quoted with."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return ``call`` as a CUDA graph, after a warm-up on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def environment(device: str) -> dict[str, Any]:
    """Return what a figure must be quoted with."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "triton": triton_version}


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as text, columns aligned on the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths)) for line in lines)


def parser_of(description: str | None, shapes: Collection[str]) -> argparse.ArgumentParser:
    """Return a parser of what every runner takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="shape", help=f"of {', '.join(shapes)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    return parser


def parse_shapes(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, shapes: Collection[str], default: Sequence[str]
) -> argparse.Namespace:
    """Parse the command line; the default shapes if none is named, exit with a message if one is not known."""
    options = parser.parse_args(arguments)
    options.shapes = options.shapes or list(default)
    unknown = [name for name in options.shapes if name not in shapes]
    if unknown:
        parser.error(f"unknown shape {', '.join(unknown)}; known: {', '.join(shapes)}")
    return options
