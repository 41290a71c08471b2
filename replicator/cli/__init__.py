"""Subcommands of `rt` that the replicator brings."""
