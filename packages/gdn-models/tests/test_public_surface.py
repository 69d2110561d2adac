"""What the package exports, documents and needs to be imported."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest
import torch

import gdn_models

MODULES = ["gdn_models", *(f"gdn_models.{module.name}" for module in pkgutil.iter_modules(gdn_models.__path__))]

PROBE = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
torch.cuda._lazy_init = lambda: (_ for _ in ()).throw(AssertionError("CUDA was initialised"))
import gdn_models
block = gdn_models.BidirectionalGDN(dim=8, heads=2)
block(torch.rand(1, 6, 8), (3, 2, 1)).sum().backward()
assert not torch.cuda.is_initialized()
print(gdn_models.__version__)
"""


def test_import_and_use_without_triton_and_without_initialising_cuda() -> None:
    """FC-I07."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == gdn_models.__version__


def test_public_names_exist_and_are_documented() -> None:
    assert gdn_models.__all__ == sorted(gdn_models.__all__)
    for name in gdn_models.__all__:
        value = getattr(gdn_models, name)
        assert name.startswith("__") or value.__doc__, name
        assert name.startswith("__") or value.__module__.startswith("gdn_models."), name


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__about__")])
def test_examples_in_docstrings_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch})
    assert results.failed == 0


def test_examples_are_found() -> None:
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES]
    with_examples = {test.name.rsplit(".", 1)[-1] for m in modules for test in finder.find(m) if test.examples}
    public = {name for name in gdn_models.__all__ if not name.startswith("__")}
    assert public <= with_examples, public - with_examples
