"""What the documentation shows runs: code blocks of READMEs and guides, docstring examples, example scripts."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gdn_cp
import gdn_kernels
import gdn_models

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "packages").glob("*/README.md")),
    *sorted((ROOT / "docs/guide").glob("*.md")),
    *sorted((ROOT / "docs/modules").glob("*.md")),
]
EXAMPLES = sorted((ROOT / "packages").glob("*/examples/*.py"))
BLOCK = re.compile(r"(<!-- continues -->\n)?```python\n(.*?)```", re.DOTALL)
MODULES = [
    name
    for package in (gdn_kernels, gdn_cp, gdn_models)
    for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_code_blocks_run(path):
    names: dict[str, object] = {}
    blocks = BLOCK.findall(path.read_text())
    assert blocks
    for continues, code in blocks:
        names = names if continues else {}
        exec(compile(code, str(path), "exec"), names)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton" or sys.platform == "linux":
            raise
        pytest.skip("a module of kernels, and Triton is for Linux")
    names = {key: getattr(package, key) for package in (gdn_kernels, gdn_cp, gdn_models) for key in package.__all__}
    result = doctest.testmod(module, globs={"torch": torch, **names, **vars(module)}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
