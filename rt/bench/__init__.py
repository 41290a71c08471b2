"""Benchmarks of rt's own parts, and how benchmarks measure. docs/benchmarks.md has the figures."""
