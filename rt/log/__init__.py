"""The log library: segments of checksummed, columnar batches in a directory, written by one, read by many.

Bytes and decisions: layout, checksum, segment, batch, block, columns, frames, durable, index, table, recovery
(pure). Edges: disk, directory, writer, reader, watch, verify.
"""
