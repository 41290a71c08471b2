"""Benchmarks of the sequencer with real processes. The figures of docs/benchmarks.md come from them.

cli         `rt bench raft` and `rt bench transport`, which `rt bench` finds as entry points
raft        consensus, on a cluster of its own (`cluster`, `node`)
transport   the whole transport; its parts are in `speed`, `failover`, `backlog` and `merge_speed`
stage       nodes, publishers and a subscriber (`traffic`) for one part
"""
