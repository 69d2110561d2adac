"""Settings that a process must have before it first uses the GPU, and the benchmark's clips on the path."""

import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products of the reference, repeatable
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
