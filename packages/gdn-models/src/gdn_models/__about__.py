"""The version of gdn-models, one line."""

__version__ = "0.1.0"
