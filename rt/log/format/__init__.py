"""Bytes on disk and back. Pure; each module has the diagram of its structure."""
