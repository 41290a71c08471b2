"""Benchmarks of the sequencer's parts: what README's figures are measured with.

Each runs real processes; `rt bench` finds them as entry points.
"""
