"""Release one package: ``release.py PACKAGE VERSION`` sets the version, builds the changelog, commits and tags.

The ranges of the packages that depend on it move along if the version leaves them. Nothing is pushed.
"""

import re
import subprocess
import sys
from pathlib import Path

import check_layout

ROOT = Path.cwd()


def set_version(root: Path, package: str, version: str) -> None:
    """Write ``version`` into the package's ``__about__.py``, and into ranges of dependents that exclude it."""
    path = check_layout.about(root, package)
    path.write_text(re.sub(r'(?m)^__version__ = ".*"$', f'__version__ = "{version}"', path.read_text()))
    major, minor, _ = check_layout.version(root, package)
    for problem in list(check_layout.wrong_ranges(root)):
        dependent = root / "packages" / problem.split(" needs ")[0] / "pyproject.toml"
        moved = rf'"{package}\1>={major}.{minor},<{major}.{minor + 1}"'
        dependent.write_text(re.sub(rf'"{package}(\[[a-z]+\])?[<>=!~][^"]*"', moved, dependent.read_text()))


def main() -> None:
    if len(sys.argv) != 3 or not re.fullmatch(r"\d+\.\d+\.\d+", sys.argv[2]):
        sys.exit(__doc__)
    package, version = sys.argv[1:]
    folder = ROOT / "packages" / package
    if package not in check_layout.PACKAGES or not folder.is_dir():
        sys.exit(f"no package {package!r} below {ROOT}: run this in the repository's root, for one of its packages")
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True).stdout:
        sys.exit("the tree has changes that are not committed")
    if tuple(int(part) for part in version.split(".")) < check_layout.version(ROOT, package):
        sys.exit(f"{package} is beyond {version} already")
    if not any((folder / "changelog.d").glob("*.md")):
        sys.exit(f"{package} has no changelog fragment: there is nothing to release")
    set_version(ROOT, package, version)
    # A module of the environment that runs this, so that no path decides which towncrier it is.
    for command, where in (
        ([sys.executable, "-m", "towncrier", "build", "--yes", "--version", version], folder),
        (["git", "add", "--all", "packages"], ROOT),
        (["git", "commit", "--message", f"{package} {version}"], ROOT),
        (["git", "tag", f"{package}-v{version}"], ROOT),
    ):
        subprocess.run(command, cwd=where, check=True)


if __name__ == "__main__":
    main()
