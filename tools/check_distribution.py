"""Fail unless a package's sdist and wheel hold what they must, and nothing else: ``check_distribution.py PACKAGE DIR``."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def problems(package: str, sdist: set[str], wheel: set[str]) -> list[str]:
    """Return what is wrong with the names in the two archives (the sdist's without its top folder)."""
    module = package.replace("-", "_")
    source = ROOT / "packages" / package / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = [f"wheel lacks {name}" for name in sorted(expected - wheel)]
    extra = {name for name in wheel - expected if ".dist-info/" not in name}
    found += [f"wheel holds {name}" for name in sorted(extra)]
    needed = {f"src/{module}/py.typed", f"src/{module}/__about__.py", "README.md", "CHANGELOG.md", "LICENSE"}
    found += [f"sdist lacks {name}" for name in sorted(needed - sdist)]
    found += [f"sdist holds {name}" for name in sorted(sdist) if name.startswith(("benchmarks/results", ".nox"))]
    return found


def main() -> None:
    package, folder = sys.argv[1], Path(sys.argv[2])
    stem = package.replace("-", "_")
    sdist_path = max(folder.glob(f"{stem}-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    wheel_path = max(folder.glob(f"{stem}-*.whl"), key=lambda path: path.stat().st_mtime)
    with tarfile.open(sdist_path) as archive:
        sdist = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    with zipfile.ZipFile(wheel_path) as archive:
        wheel = set(archive.namelist())
    found = problems(package, sdist, wheel)
    print("\n".join(found) or f"{package}: sdist and wheel are complete")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
