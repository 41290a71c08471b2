"""Verify, compare and describe log directories."""
