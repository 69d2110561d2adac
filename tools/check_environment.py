"""Fail unless the named packages are imported from this environment and are, byte for byte, those of the tree."""

import importlib.util
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = Path(sysconfig.get_paths()["purelib"]).resolve()

for package in sys.argv[1:]:
    module = package.replace("-", "_")
    spec = importlib.util.find_spec(module)
    folders = [Path(folder).resolve() for folder in (spec and spec.submodule_search_locations) or ()]
    if folders != [INSTALLED / module]:
        sys.exit(f"{package} comes from {folders or 'nowhere'}, not from {INSTALLED}")
    source = ROOT / "packages" / package / "src" / module
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = INSTALLED / module / path.relative_to(source)
            if not copy.is_file() or copy.read_bytes() != path.read_bytes():
                sys.exit(f"{copy} is not the {path.relative_to(ROOT)} of the tree")
