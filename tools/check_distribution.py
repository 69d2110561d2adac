"""Fail unless an sdist and a wheel hold what they must, and nothing else: ``check_distribution.py PACKAGE DIR``."""

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


def main() -> None:
    package, folder = sys.argv[1], Path(sys.argv[2])
    (sdist_path,) = folder.glob("*.tar.gz")
    (wheel_path,) = folder.glob("*.whl")
    with tarfile.open(sdist_path) as archive:
        sdist = {name.split("/", 1)[1] for name in archive.getnames()}
    with zipfile.ZipFile(wheel_path) as archive:
        wheel = set(archive.namelist())
    found = problems(package, sdist, wheel)
    print("\n".join(found) or f"{package}: sdist and wheel hold what they must, and nothing else")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
