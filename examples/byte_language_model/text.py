"""Text to learn from: the pages of this repository, as bytes, packed into one stream of documents."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent.parent


class Text(NamedTuple):
    """All documents, one after another, ``[total]`` int64, and where each starts, with the total last."""

    tokens: Tensor
    bounds: tuple[int, ...]


class Batch(NamedTuple):
    """Packed pieces of documents: inputs and targets ``[1, T]``, and the first token of each piece, with T last."""

    inputs: Tensor
    targets: Tensor
    bounds: tuple[int, ...]


def load_text(root: Path = ROOT) -> Text:
    """Read the READMEs and the documentation."""
    pages = sorted({*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("packages/**/README.md")})
    documents = [page.read_bytes() for page in pages]
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    return Text(torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8).long(), tuple(bounds))


def batch_of(text: Text, step: int, tokens: int, seed: int) -> Batch:
    """Return pieces of random length from random documents, packed into ``tokens``, the same in every process."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    inputs, targets, bounds = [], [], [0]
    while bounds[-1] < tokens:
        document = draw(len(text.bounds) - 1)
        start, stop = text.bounds[document], text.bounds[document + 1]
        length = min(24 + draw(tokens // 2), stop - start - 1, tokens - bounds[-1])
        if length < 1:
            continue
        first = start + draw(stop - start - length)
        inputs.append(text.tokens[first : first + length])
        targets.append(text.tokens[first + 1 : first + length + 1])
        bounds.append(bounds[-1] + length)
    return Batch(torch.cat(inputs)[None], torch.cat(targets)[None], tuple(bounds))
