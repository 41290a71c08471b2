"""Feature levels: the commands and formats that the members of a cluster may use.

Pure. The cluster's level is part of the replicated state, and only an operator raises it. Invariants:
- A program writes something that a level introduces only if the cluster has that level. It reads everything
  up to `LATEST`.
- The level never decreases. Until it is raised, every member can go back to a program of the previous level.
- At level 1, rt writes the same bytes as before feature levels existed.
- A program that does not know the cluster's level stops: see `check_known`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from rt.errors import RtError, UnknownVersion
from rt.v1 import sequencer_pb2 as pb

MEMBER_CHANGES: Final = 2
PERMITS: Final = {
    1: "everything that rt did before there were feature levels",
    MEMBER_CHANGES: "changes of the members of the cluster",
}
"""By level: what it permits in addition to the levels below."""
LATEST: Final = max(PERMITS)
"""This program knows the levels from 1 to this one."""
UPGRADE_HINT: Final = (
    "Install the version of rt that the other nodes run, or a newer one: "
    "`rt features list` on another node shows it."
)


class FeatureLevelRefused(RtError):
    """The cluster cannot be raised to this level now. Nothing was changed."""

    grpc_status = "FAILED_PRECONDITION"


class MemberLevel(NamedTuple):
    """A member's report about its program."""

    member: str
    latest: int
    """The highest level that its program knows. A program that reports none knows level 1."""
    version: str
    """The version of rt; empty if the program reports none."""
    is_current: bool
    """Whether it reported this a short time ago."""


def member_level(member: str, summary: pb.Summary, *, is_current: bool) -> MemberLevel:
    return MemberLevel(member, max(summary.feature_level_latest, 1), summary.rt_version, is_current)


def check_known(level: int, where: str | None = None) -> int:
    """Return the level of a cluster. `rt.UnknownVersion` if this program does not know it."""
    if not 1 <= level <= LATEST:
        raise UnknownVersion(
            "the cluster has a feature level that this rt does not know",
            where=where,
            got=f"level {level}",
            expected=f"level {LATEST} at most",
            hint=UPGRADE_HINT,
        )
    return level


def check_raise(level: int, current: int, members: Iterable[MemberLevel]) -> None:
    """`FeatureLevelRefused` unless the cluster can be raised from `current` to `level`."""
    if level <= current:
        raise FeatureLevelRefused(
            "a feature level can only be raised",
            got=f"level {level}",
            expected=f"a level above {current}, which the cluster has",
            hint="`rt features list` shows the levels.",
        )
    for one in sorted(members):
        if not one.is_current:
            raise FeatureLevelRefused(
                "a member has not reported which feature levels it knows",
                where=f"member {one.member}",
                got="no report in the last seconds",
                expected=f"a report with level {level} or higher",
                hint="Start it, or check its network. Then try again.",
            )
        if one.latest < level:
            raise FeatureLevelRefused(
                "a member does not know this feature level",
                where=f"member {one.member}",
                got=f"rt {one.version or 'of an older version'} with level {one.latest} at most",
                expected=f"level {level}",
                hint=f"Install a newer rt on {one.member} and restart it. Then try again.",
            )


def raise_notes(current: int, members: Sequence[MemberLevel]) -> Iterator[str]:
    """A sentence for operators if all members know a higher level than the cluster has."""
    latest = min((one.latest if one.is_current else 1 for one in members), default=1)
    if latest > current:
        new = "; ".join(PERMITS[level] for level in range(current + 1, latest + 1))
        yield (
            f"All members know feature level {latest} ({new}), and the cluster has level {current}. When you "
            f"will not go back to an older rt: `rt features raise {latest}`."
        )
