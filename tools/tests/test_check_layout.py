"""The layout check finds each kind of problem in a tree made for it."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import check_layout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for package in check_layout.PACKAGES:
        source = check_layout.ROOT / "packages" / package
        module = package.replace("-", "_")
        target = tmp_path / "packages" / package
        (target / "src" / module).mkdir(parents=True)
        (target / "tests").mkdir()
        (target / "changelog.d").mkdir()
        shutil.copy(source / "pyproject.toml", target)
        shutil.copy(source / "src" / module / "__about__.py", target / "src" / module)
    assert check_layout.problems(tmp_path) == []
    return tmp_path


def test_the_repository_itself_is_in_order():
    assert check_layout.problems(check_layout.ROOT) == []


def test_a_sibling_range_left_behind_by_a_version_is_found(tree):
    (tree / "packages/gdn-kernels/src/gdn_kernels/__about__.py").write_text('__version__ = "0.2.0"\n')
    assert [line.split(" needs ")[0] for line in check_layout.problems(tree)] == ["gdn-cp", "gdn-models"]


def test_a_fragment_of_unknown_kind_is_found(tree):
    (tree / "packages/gdn-cp/changelog.d/halo.feature.md").write_text("x")
    assert "halo.feature.md is not" in check_layout.problems(tree)[0]


def test_a_test_without_a_source_is_found(tree):
    (tree / "packages/gdn-models/tests/test_nothing.py").write_text("")
    assert "test_nothing.py mirrors no source" in check_layout.problems(tree)[0]


@pytest.mark.parametrize("line", ["import torch.distributed as dist", "from torch import distributed"])
def test_a_second_importer_of_torch_distributed_is_found(tree, line):
    (tree / "packages/gdn-cp/src/gdn_cp/halo.py").write_text(f"{line}\n")
    assert "only collectives.py may" in check_layout.problems(tree)[0]
