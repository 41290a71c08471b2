"""Operators on several sources: all at once, or one after the other."""
