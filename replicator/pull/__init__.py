"""Merged-log pull: client and server."""
