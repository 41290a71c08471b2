"""Raft's messages, entries and configuration, and the `StateMachine` protocol. Pure."""
