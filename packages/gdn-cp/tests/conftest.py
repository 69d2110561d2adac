"""Fixtures of gdn-cp's tests, and the folder's own modules on the path."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # ranks and clips, under any import mode


@pytest.fixture(autouse=True)
def _fresh_torch() -> Iterator[None]:
    """Seed each test, and let memory that nobody wrote hold NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
