"""A small tree in the shape of the repository, to break in one way per test."""

import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # tools are scripts, not a package
import check_layout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = check_layout.ROOT
    (tmp_path / "tools").mkdir()
    (tmp_path / "docs" / "api").mkdir(parents=True)
    shutil.copy(root / "tools" / "changelog.md.jinja", tmp_path / "tools")
    shutil.copy(root / "LICENSE", tmp_path)
    for package in check_layout.PACKAGES:
        folder = tmp_path / "packages" / package
        (folder / "tests").mkdir(parents=True)
        (folder / "changelog.d").mkdir()
        (folder / "CHANGELOG.md").write_text(f"# Changelog of {package}\n\n<!-- fragments are collected below -->\n")
        shutil.copy(root / "LICENSE", folder)
        text = (root / "packages" / package / "pyproject.toml").read_text()
        (folder / "pyproject.toml").write_text(re.sub(r'"(gdn-[a-z]+)>=[^"]*"', r'"\1>=0.1,<0.2"', text))
        about = check_layout.about(tmp_path, package)
        about.parent.mkdir(parents=True)
        about.write_text('__version__ = "0.1.0"\n')
        (about.parent / "__init__.py").write_text('__all__ = ["Gate", "__version__"]\n')
        (tmp_path / "docs" / "api" / f"{package.removeprefix('gdn-')}.md").write_text(f"::: {about.parent.name}.Gate\n")
    assert check_layout.problems(tmp_path) == []
    return tmp_path
