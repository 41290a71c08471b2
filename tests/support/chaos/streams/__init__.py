"""Hosts of streams over real clusters, under faults that a seed draws, and a judge who knows every event."""
