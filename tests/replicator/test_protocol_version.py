"""Which version of a protocol two programs use."""

from __future__ import annotations

import pytest

from replicator.protocol.version import VersionRange, common_version, range_of
from rt.errors import UnknownVersion


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (2, 3), 2),
        ((1, 9), (3, 4), 4),
        ((1, 1), (2, 2), None),
        ((1, 2), (3, 9), None),
    ],
)
def test_common_version_is_latest_shared_or_raises_unknown_version_with_both_ranges(
    one: tuple[int, int], other: tuple[int, int], common: int | None
) -> None:
    for own, peer in ((VersionRange(*one), VersionRange(*other)), (VersionRange(*other), VersionRange(*one))):
        if common is not None:
            assert common_version(own, peer) == common
            continue
        with pytest.raises(UnknownVersion) as refused:
            common_version(own, peer, "node n1")
        found = refused.value
        assert (found.where, found.got, found.expected) == ("node n1", str(peer), str(own))
        assert found.hint is not None


@pytest.mark.parametrize(
    ("oldest", "latest", "known"),
    [(0, 0, (1, 1)), (1, 0, (1, 1)), (2, 0, (2, 2)), (2, 3, (2, 3)), (3, 2, (3, 3))],
)
def test_version_missing_in_handshake_defaults_to_1(oldest: int, latest: int, known: tuple[int, int]) -> None:
    assert range_of(oldest, latest) == known
