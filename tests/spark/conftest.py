"""One Spark session and one cluster for all tests that need them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Start a local session with two cores. The workers run the Python interpreter of this process."""
    from spark_sessions import local_session

    session = local_session(tmp_path_factory.mktemp("spark"), sys.executable, os.environ)
    yield session
    session.stop()


@pytest.fixture(scope="package")
def sink() -> Iterator[object]:
    """Start three nodes that Spark writes to and reads from. Each test uses its own names there."""
    from sink_nodes import running_sink

    with running_sink() as sink:
        yield sink
