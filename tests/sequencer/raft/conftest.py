"""What tests of Raft share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from raft_bench import Clock, virtual_clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    """Time that goes on when a test says so."""
    with virtual_clock() as clock:
        yield clock
