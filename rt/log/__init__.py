"""The log library: segments of checksummed, columnar batches in a directory with one writer and many readers.

`format` has bytes on disk, `scan` verified batches and columns, `write` and `read` the writer and the
readers, `check` tools for whole directories. All I/O goes through `disk`.
"""
