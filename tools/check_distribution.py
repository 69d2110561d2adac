"""Fail unless a package's sdist and wheel hold what they must, and nothing else: ``check_distribution.py PACKAGE DIR``.

Prints the path of the sdist, for whoever installs it next.
"""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}
FOLDERS = ("src", "tests", "examples")
MADE = {"PKG-INFO", ".gitignore"}  # by the build backend


def files(folder: Path, top: Path) -> set[str]:
    """Return the names of the files below ``folder``, relative to ``top``."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(top).as_posix() for path in paths}


def problems(package: str, sdist: set[str], wheel: set[str]) -> list[str]:
    """Return what is wrong with the names in the two archives (the sdist's without its top folder)."""
    top = ROOT / "packages" / package
    in_sdist = TOP.union(*(files(top / folder, top) for folder in FOLDERS))
    in_wheel = files(top / "src", top / "src")
    metadata = {name for name in wheel if ".dist-info/" in name}
    found = [f"sdist lacks {name}" for name in sorted(in_sdist - sdist)]
    found += [f"sdist holds {name}" for name in sorted(sdist - in_sdist - MADE)]
    found += [f"wheel lacks {name}" for name in sorted(in_wheel - wheel)]
    found += [f"wheel holds {name}" for name in sorted(wheel - in_wheel - metadata)]
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        found.append("wheel lacks its licence")
    return found


def newest(folder: Path, pattern: str) -> Path:
    """Return the file of this pattern that was written last."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime)


def main() -> None:
    package, folder = sys.argv[1], Path(sys.argv[2])
    stem = package.replace("-", "_")
    sdist_path = newest(folder, f"{stem}-*.tar.gz")
    with tarfile.open(sdist_path) as archive:
        sdist = {name.split("/", 1)[1] for name in archive.getnames()}
    with zipfile.ZipFile(newest(folder, f"{stem}-*.whl")) as archive:
        wheel = set(archive.namelist())
    if found := problems(package, sdist, wheel):
        sys.exit("\n".join(found))
    print(sdist_path)


if __name__ == "__main__":
    main()
