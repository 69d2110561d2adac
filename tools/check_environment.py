"""Fail unless the named packages are imported from this environment: not from a source tree, not from another one."""

import importlib.util
import sys
import sysconfig
from pathlib import Path

installed = Path(sysconfig.get_paths()["purelib"]).resolve()
for distribution in sys.argv[1:]:
    spec = importlib.util.find_spec(distribution.replace("-", "_"))
    if spec is None or spec.origin is None or installed not in Path(spec.origin).resolve().parents:
        sys.exit(f"{distribution} comes from {spec and spec.origin}, not from {installed}")
