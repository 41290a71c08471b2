"""Hosts of streams on real clusters under random faults from a seed, and a verdict based on every event."""
