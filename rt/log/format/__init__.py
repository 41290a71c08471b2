"""Encode and decode the bytes on disk. Pure; each module has the diagram of its structure."""
