"""Settings that a process must have before it first uses the GPU."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products of the reference, repeatable
