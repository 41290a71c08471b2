"""A cluster of real nodes with a directory of its own, which goes with it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from chaos.wired_nodes import WiredNodes


@contextlib.contextmanager
def whole_cluster() -> Iterator[WiredNodes]:
    """It is ready when it is entered."""
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets want a short path.
    try:
        with WiredNodes(root) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield nodes
    finally:
        shutil.rmtree(root)
