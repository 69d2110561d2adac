"""Paths of the integration tests: this folder's own modules, and gdn-cp's harness that starts ranks.

`ranks.py` is test support of gdn-cp and ships in no wheel, so it is taken from the tree rather than copied.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
for folder in (HERE.parent / "packages" / "gdn-cp" / "tests", HERE):
    sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True)
def _fresh_torch() -> Iterator[None]:
    """Seed each test, and let memory that nobody wrote hold NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
