"""Edges, checkpoints and recovery of a query engine."""
