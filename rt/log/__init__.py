"""The log library: segments of checksummed, columnar batches in a directory, written by one, read by many.

Bytes and decisions, pure: layout, checksum, chain, segment, batch, block, messages, columns, frames, gather,
durable, index, table, recovery. Edges: disk, directory, walk, opening, active, copying, writer, catalog,
reader, watch, and what looks at whole directories: verify, compare, status.
"""
