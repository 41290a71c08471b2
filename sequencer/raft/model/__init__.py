"""Raft's messages, entries and configuration, and the Consensus protocol. Pure."""
