"""The log library: segments of checksummed, columnar batches in a directory with one writer and many readers.

`format` has the bytes on disk, `scan` has verified batches and columns, `write` has the writer, `read` has
the readers, and `check` has tools for whole directories. All I/O goes through `disk`.
"""
