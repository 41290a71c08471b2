"""Operators on one source: they select values, transform values, or emit one result at the end."""
