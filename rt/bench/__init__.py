"""Benchmarks of rt's own parts. The figures of the README come from them."""
