"""The version of gdn-cp, one line."""

__version__ = "0.1.0"
