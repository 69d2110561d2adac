"""Release one package: ``release.py PACKAGE VERSION`` sets the version, builds the changelog, commits and tags."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def set_version(about: Path, version: str) -> None:
    """Write ``version`` into an ``__about__.py``."""
    text, count = re.subn(r'(?m)^__version__ = ".*"$', f'__version__ = "{version}"', about.read_text())
    if count != 1:
        sys.exit(f"{about} has no line __version__ = ...")
    about.write_text(text)


def main() -> None:
    if len(sys.argv) != 3 or not re.fullmatch(r"\d+\.\d+\.\d+", sys.argv[2]):
        sys.exit(__doc__)
    package, version = sys.argv[1:]
    folder = ROOT / "packages" / package
    if not folder.is_dir():
        sys.exit(f"there is no package {package} in {folder.parent}")
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True).stdout:
        sys.exit("the tree has changes that are not committed")
    set_version(folder / "src" / package.replace("-", "_") / "__about__.py", version)
    subprocess.run(["towncrier", "build", "--yes", "--version", version], cwd=folder, check=True)
    for command in (
        ["git", "add", "--all", str(folder)],
        ["git", "commit", "--message", f"{package} {version}"],
        ["git", "tag", f"{package}-v{version}"],
    ):
        subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
