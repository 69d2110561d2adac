"""The frame-wise gated delta network: equations in README.md, entry points in op.py."""
