"""Benchmarks of the sequencer's parts: what README's figures are measured with.

Each runs real processes; `rt bench` finds them as entry points (`cli`). Consensus: `raft`, on a cluster of
its own (`cluster`, `node`). The whole transport: `transport` lists the parts, which are `speed`, `failover`,
`backlog` and `merging`; they stand on `stage`, have `traffic` publish and read, and ask `usage` and `audit`.
"""
