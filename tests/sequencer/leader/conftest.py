"""Fixtures for the tests of the leader."""

from __future__ import annotations

import pytest
from leader_bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
