"""Gated delta product over ranks: the published entry point in `common`, backends in modules of their own."""
