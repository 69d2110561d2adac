"""Check what the tree promises: tests mirror sources, sibling ranges follow versions, fragments have known names.

Run from anywhere; prints every problem and exits 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gdn-kernels", "gdn-cp", "gdn-models")
KINDS = ("added", "changed", "deprecated", "removed", "fixed", "numerics")
FREE_TEST_FOLDERS = {"interpret", "compile", "gpu"}  # one way of running each, over many sources


def version(root: Path, package: str) -> str:
    """Return the version of a package, one line of its ``__about__.py``."""
    about = (root / "packages" / package / "src" / package.replace("-", "_") / "__about__.py").read_text()
    found = re.search(r'^__version__ = "(\d+\.\d+\.\d+)"$', about, re.MULTILINE)
    return found.group(1) if found else "0.0.0"


def wrong_ranges(root: Path) -> Iterator[str]:
    """Yield siblings whose range does not admit exactly the present minor version."""
    for package in PACKAGES:
        text = (root / "packages" / package / "pyproject.toml").read_text()
        for sibling, wanted in re.findall(r'"(gdn-[a-z]+)([><=!~][^"]*)"', text):
            major, minor, _ = (int(part) for part in version(root, sibling).split("."))
            rule = f">={major}.{minor},<{major}.{minor + 1}"
            if wanted != rule:
                yield f"{package} needs {sibling}{wanted}, but {sibling} is at {version(root, sibling)}: {rule}"


def wrong_fragments(root: Path) -> Iterator[str]:
    """Yield changelog fragments that no release would collect."""
    for package in PACKAGES:
        for path in sorted((root / "packages" / package / "changelog.d").iterdir()):
            if not re.fullmatch(rf"[a-z0-9-]+\.({'|'.join(KINDS)})\.md", path.name):
                yield f"{path.relative_to(root)} is not <slug>.<kind>.md with a kind of {', '.join(KINDS)}"


def stray_tests(root: Path) -> Iterator[str]:
    """Yield test files that mirror no source file or folder."""
    for package in PACKAGES:
        source = root / "packages" / package / "src" / package.replace("-", "_")
        tests = root / "packages" / package / "tests"
        for path in sorted(tests.rglob("test_*.py")):
            relative = path.relative_to(tests)
            if relative.parts[0] in FREE_TEST_FOLDERS:
                continue
            stem = relative.stem.removeprefix("test_")
            sources = [source / relative.parent / f"{stem}.py", source / relative.parent / stem, tests / f"{stem}.py"]
            folder = source / relative.parent
            begins = any(stem.startswith(f"{x.stem}_") for x in folder.glob("*.py")) if folder.is_dir() else False
            if not begins and not any(x.exists() for x in sources) and stem not in ("import", "public_surface"):
                yield f"{path.relative_to(root)} mirrors no source file or folder of {package}"


def stray_distributed(root: Path) -> Iterator[str]:
    """Yield modules other than ``gdn_cp/collectives.py`` that import ``torch.distributed``."""
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        if path.as_posix().endswith("gdn_cp/collectives.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in names):
                yield f"{path.relative_to(root)}:{node.lineno} imports torch.distributed; only collectives.py may"


def problems(root: Path) -> list[str]:
    """Return every problem of the tree below ``root``."""
    return [*wrong_ranges(root), *wrong_fragments(root), *stray_tests(root), *stray_distributed(root)]


if __name__ == "__main__":
    found = problems(ROOT)
    print("\n".join(found) or "layout: as promised")
    sys.exit(bool(found))
