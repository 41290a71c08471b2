"""Operators on one source: which values they emit, what they make of them, and one result at the end."""
