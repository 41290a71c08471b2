"""Resource limits of a node's processes."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from sequencer.node.child_main import allow_many_files


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_open_file_limit_is_raised_to_hard_limit(limits):
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    allow_many_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
