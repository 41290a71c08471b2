"""Positions of a merged log as operators name them: a number, an end of the log, or a time."""

from __future__ import annotations

import contextlib
import time
from importlib.metadata import entry_points
from typing import Any, Final, Literal, TypeAlias, cast

import click

from rt.errors import RtError
from rt.log.read.start_position import StartTime
from rt.net.tls import TLS
from rt.units import parse_since

Goal: TypeAlias = int | Literal["earliest", "latest"] | StartTime


_DIGITS_MAX: Final = 100
"""Maximum number of digits. Python converts no number of more than 4,300 digits."""


class GoalType(click.ParamType):  # type: ignore[type-arg]
    """A position, an end of the log, or a time."""

    name = "position"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Goal:
        match value:
            case "earliest" | "latest":
                return cast(Goal, value)
            case str() if value.isascii() and value.isdecimal() and len(value) <= _DIGITS_MAX:
                return int(value)
        if value.startswith("-"):
            self.fail("a position is not negative: use a number, earliest, latest or a time.", param, ctx)
        try:
            return StartTime(parse_since(value, time.time_ns()))
        except ValueError as error:
            self.fail(f"{error}. Also a position, earliest or latest.", param, ctx)


def bounds_of(endpoints: tuple[str, ...], tls: TLS | None, connect_s: float) -> tuple[int, int]:
    """The first position of the merged log of the nodes, and its end."""
    with contextlib.closing(_open_log(endpoints, tls, connect_s)) as log:
        start, end = log.bounds()
        return int(start), int(end)


def position_of(goal: Goal, endpoints: tuple[str, ...], tls: TLS | None, connect_s: float) -> int:
    """The position of `goal` in the merged log of the nodes, as it is now. `rt.RtError` if it is outside the
    log.
    """
    with contextlib.closing(_open_log(endpoints, tls, connect_s)) as log:
        start, end = log.bounds()
        match goal:
            case "earliest":
                return int(start)
            case "latest":
                return int(end)
            case StartTime(timestamp_ns):
                return int(log.find_time(start, end, timestamp_ns))
    if not start <= goal <= end:
        raise RtError(
            "the merged log has no such position",
            where="--to",
            got=goal,
            expected=f"{start} to {end}",
            hint="earliest and latest are its ends.",
        )
    return goal


def _open_log(endpoints: tuple[str, ...], tls: TLS | None, connect_s: float) -> Any:
    """Open the merged log of the nodes. rt imports no service, so the log is an entry point, as for
    `rt.spark`.
    """
    (found,) = entry_points(group="rt.logs", name="nodes")
    assert tls is not None  # The endpoints are required.
    files = {"ca": str(tls.ca), "cert": str(tls.cert), "key": str(tls.key)}
    return found.load()(endpoints, tls.identity.stream, **files, connect_seconds=connect_s)
