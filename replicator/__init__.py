"""Replication: moves log directories of append-only segments between machines, over mutual TLS."""
