"""Check what the tree promises: tests mirror sources, ranges follow versions, API pages and fragments have their names.

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
FREE_TESTS = {"import", "public_surface", "benchmarks", "once"}  # of a package as a whole
DISTRIBUTED_IMPORTER = "gdn_cp/collectives.py"


def about(root: Path, package: str) -> Path:
    """Return the file that holds the version of a package."""
    return root / "packages" / package / "src" / package.replace("-", "_") / "__about__.py"


def version(root: Path, package: str) -> tuple[int, int, int]:
    """Return the version of a package, one line of its ``__about__.py``."""
    found = re.search(r'^__version__ = "(\d+)\.(\d+)\.(\d+)"$', about(root, package).read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f'{about(root, package)} has no line __version__ = "x.y.z"')
    major, minor, patch = (int(part) for part in found.groups())
    return major, minor, patch


def sibling_ranges(root: Path, package: str) -> list[tuple[str, str]]:
    """Return the siblings that a package declares, each with its range."""
    declared = (root / "packages" / package / "pyproject.toml").read_text()
    return re.findall(r'"(gdn-[a-z]+)(?:\[[a-z]+\])?([<>=!~][^"]*)"', declared)


def wrong_ranges(root: Path) -> Iterator[str]:
    """Yield siblings whose range is not one minor version, from a release of it that exists."""
    for package in PACKAGES:
        for sibling, wanted in sibling_ranges(root, package):
            major, minor, patch = version(root, sibling)
            admitted = re.fullmatch(rf">={major}\.{minor}(?:\.(\d+))?,<{major}\.{minor + 1}", wanted)
            if admitted is None or int(admitted.group(1) or 0) > patch:
                rule = f">={major}.{minor},<{major}.{minor + 1}"
                yield f"{package} needs {sibling}{wanted}, but {sibling} is at {major}.{minor}.{patch}: {rule}"


def wrong_fragments(root: Path) -> Iterator[str]:
    """Yield changelog fragments that no release would collect."""
    for package in PACKAGES:
        for path in sorted((root / "packages" / package / "changelog.d").glob("*")):
            if path.name != ".gitignore" and not re.fullmatch(rf"[a-z0-9-]+\.({'|'.join(KINDS)})\.md", path.name):
                yield f"{path.relative_to(root)} is not <slug>.<kind>.md with a kind of {', '.join(KINDS)}"


def stray_tests(root: Path) -> Iterator[str]:
    """Yield test files that mirror no source.

    ``tests/a/test_b.py`` and ``tests/a/test_b_claim.py`` mirror ``a/b.py`` or the folder ``a/b``, or test the support
    module ``tests/a/b.py``.
    """
    for package in PACKAGES:
        source = root / "packages" / package / "src" / package.replace("-", "_")
        tests = root / "packages" / package / "tests"
        for path in sorted(tests.rglob("test_*.py")):
            folder, stem = path.relative_to(tests).parent, path.stem.removeprefix("test_")
            if folder.parts[:1] and folder.parts[0] in FREE_TEST_FOLDERS:
                continue
            words = stem.split("_")
            beginnings = {"_".join(words[:count]) for count in range(1, len(words) + 1)}
            tested = {x.stem for top in (source, tests) for x in (top / folder).glob("*") if x.suffix in ("", ".py")}
            if not beginnings & (tested | FREE_TESTS):
                yield f"{path.relative_to(root)} mirrors no source file or folder of {package}"


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module that run, so not what ``if TYPE_CHECKING:`` holds."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from (other, *run_time_nodes(other))
        else:
            yield from (node, *run_time_nodes(node))


def stray_distributed(root: Path) -> Iterator[str]:
    """Yield places outside ``gdn_cp/collectives.py`` that import or reach into ``torch.distributed``."""
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        if path.as_posix().endswith(DISTRIBUTED_IMPORTER):
            continue
        lines = set()
        for node in run_time_nodes(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            if any(f"{name}.".startswith("torch.distributed.") for name in names):
                lines.add(node.lineno)
        for line in sorted(lines):
            yield f"{path.relative_to(root)}:{line} uses torch.distributed; only {DISTRIBUTED_IMPORTER} may"


def unlisted_names(root: Path) -> Iterator[str]:
    """Yield public names without a place in the API pages, which list them by hand, and places without a name."""
    for package in PACKAGES:
        module = package.replace("-", "_")
        source = root / "packages" / package / "src" / module / "__init__.py"
        page = root / "docs" / "api" / f"{package.removeprefix('gdn-')}.md"
        listed = set(re.findall(rf"^::: {module}(?:\.\w+)*\.(\w+)$", page.read_text(), re.MULTILINE))
        public: set[str] = set()
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                public = set(ast.literal_eval(node.value)) - {"__version__"}
        yield from (f"{module}.{name} is not in {page.relative_to(root)}" for name in sorted(public - listed))
        yield from (f"{page.relative_to(root)} lists {module}.{name}, not public" for name in sorted(listed - public))


def different_licences(root: Path) -> Iterator[str]:
    """Yield packages whose licence, a copy for their distributions, is not the repository's."""
    for package in PACKAGES:
        if (root / "packages" / package / "LICENSE").read_bytes() != (root / "LICENSE").read_bytes():
            yield f"packages/{package}/LICENSE is not a copy of LICENSE"


def problems(root: Path) -> list[str]:
    """Return every problem of the tree below ``root``."""
    checks = (wrong_ranges, wrong_fragments, stray_tests, stray_distributed, unlisted_names, different_licences)
    return [problem for check in checks for problem in check(root)]


if __name__ == "__main__":
    found = problems(ROOT)
    print("\n".join(found) or "layout: as promised")
    sys.exit(bool(found))
