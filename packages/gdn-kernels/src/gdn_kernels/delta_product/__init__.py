"""The gated delta product: equations in README.md, entry points in op.py."""
