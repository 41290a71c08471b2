"""The version of a protocol that two programs use: the highest one that both know. Pure.

Each side of a handshake sends the oldest and the latest version that it knows. A program that sends none
knows version 1 only.
"""

from __future__ import annotations

from typing import NamedTuple

from rt.errors import UnknownVersion


class VersionRange(NamedTuple):
    """The versions that a program knows, both included."""

    oldest: int
    latest: int

    def __str__(self) -> str:
        one = self.oldest == self.latest
        return f"version {self.oldest}" if one else f"versions {self.oldest} to {self.latest}"


def range_of(oldest: int, latest: int) -> VersionRange:
    """The versions in a peer's handshake. An argument is 0 if the peer did not send it."""
    return VersionRange(oldest or 1, max(latest, oldest, 1))


def common_version(own: VersionRange, peer: VersionRange, where: str | None = None) -> int:
    """The highest version that both know. `rt.UnknownVersion` if there is none."""
    if own.oldest > peer.latest or peer.oldest > own.latest:
        raise UnknownVersion(
            "the peer does not know a version of the protocol that this program knows",
            where=where,
            got=str(peer),
            expected=str(own),
            hint="Upgrade the older side. Nodes are upgraded before their clients.",
        )
    return min(own.latest, peer.latest)
