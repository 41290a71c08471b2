"""One Spark session and one cluster for all tests that need them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A local session with two cores; the workers run this very Python."""
    from spark_sessions import local_session

    session = local_session(tmp_path_factory.mktemp("spark"), sys.executable, os.environ)
    yield session
    session.stop()


@pytest.fixture(scope="package")
def sink() -> Iterator[object]:
    """Three nodes that Spark writes to and reads from; each test has names of its own there."""
    from sink_nodes import running_sink

    with running_sink() as sink:
        yield sink
