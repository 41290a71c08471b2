"""Benchmarks of rt's own parts: what README's figures are measured with."""
