"""The version of gdn-kernels, one line."""

__version__ = "0.1.0"
