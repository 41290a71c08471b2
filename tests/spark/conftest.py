"""One Spark session for all tests that need one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A local session with two cores; the workers run this very Python."""
    from spark_sessions import local_session

    session = local_session(tmp_path_factory.mktemp("spark"), sys.executable, os.environ)
    yield session
    session.stop()
