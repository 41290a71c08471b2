"""A cluster of real nodes with its own directory, which is deleted at the end."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from chaos.wired_nodes import WiredNodes


@contextlib.contextmanager
def whole_cluster() -> Iterator[WiredNodes]:
    """Start a cluster and wait until it is ready."""
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # The path of a Unix socket must be short.
    try:
        with WiredNodes(root) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield nodes
    finally:
        shutil.rmtree(root)
