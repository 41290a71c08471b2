"""Options and their types that subcommands share. A malformed name, time or position is misuse."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rt.errors import InvalidName
from rt.log.format.constants import NUMBER_MAX
from rt.names import check_dedup_id, check_name, check_session_name
from rt.units import parse_since

if TYPE_CHECKING:
    from rt.log.read.start_position import StartTime

F = TypeVar("F", bound=Callable[..., Any])


class ExistingPath(click.Path):
    """A path that must exist. Unlike its base class, it reports a missing path only if nothing is there."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(exists=True, **settings)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            os.stat(value)
        except (FileNotFoundError, ValueError):
            pass
        except PermissionError as error:
            hint = "Run the command as the user that owns it."
            self.fail(f"{value} cannot be reached: {error.strerror}. {hint}", param, ctx)
        except OSError as error:
            self.fail(f"{value} cannot be reached: {error.strerror}", param, ctx)
        return super().convert(value, param, ctx)


DIRECTORY = ExistingPath(file_okay=False)


class _Option(click.Option):
    """Its help shows a default. Its environment variable has the name of the option, not of the parameter."""

    def __init__(self, *names: Any, **settings: Any) -> None:
        settings.setdefault("show_default", settings.get("default") not in {None, ""})
        super().__init__(*names, **settings)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        found = click.Parameter.resolve_envvar_value(self, ctx)
        if found is not None or ctx.auto_envvar_prefix is None:
            return found
        words = (name[2:].replace("-", "_").upper() for name in self.opts if name.startswith("--"))
        values = (os.environ.get(f"{ctx.auto_envvar_prefix}_{word}") for word in words)
        return next((value for value in values if value), None)


option = partial(click.option, cls=_Option)

json_option = option("--json", "as_json", is_flag=True, help="Write one JSON object a line to stdout.")


class FiniteRange(click.FloatRange):
    """A number in a range. Unlike its base it rejects NaN and infinity."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def connect_timeout_option(help_text: str, *, least: float = 0.1) -> Callable[[F], F]:
    """`--connect-timeout`, in seconds. With `least` 0 a command gets 0 for "wait indefinitely"."""
    return option(
        "--connect-timeout",
        metavar="SECONDS",
        type=FiniteRange(min=least),
        default=5.0,
        help=f"{help_text} Seconds.{'' if least else ' 0: wait indefinitely.'}",
    )


class _Name(click.ParamType):  # type: ignore[type-arg]
    name = "name"

    def __init__(self, check: Callable[[str], str]) -> None:
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return self._check(value)
        except InvalidName as error:
            self.fail(str(error), param, ctx)


class _Since(click.ParamType):  # type: ignore[type-arg]
    """A time, or a duration before now."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> StartTime:
        from rt.log.read.start_position import StartTime  # It imports numpy; most commands start without it.

        if isinstance(value, StartTime):
            return value
        try:
            return StartTime(parse_since(str(value), time.time_ns()))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Place(click.ParamType):  # type: ignore[type-arg]
    """A position, or "earliest", or "latest"."""

    name = "position"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002
        return "earliest|latest|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value in {"earliest", "latest"}:
            return str(value)
        try:
            position = int(value)
        except ValueError:
            self.fail(f"{value!r} is not 'earliest', 'latest' or a position", param, ctx)
        if not 0 <= position <= NUMBER_MAX:
            self.fail(f"{value[:50]} is not in the range from 0 to {NUMBER_MAX}", param, ctx)
        return position


STREAM_NAME = _Name(partial(check_name, kind="stream"))
SESSION_NAME = _Name(check_session_name)
SUBSCRIBER_NAME = _Name(partial(check_name, kind="subscriber"))
DEDUP_ID = _Name(check_dedup_id)
CERTIFICATE_NAME = _Name(partial(check_name, kind="certificate"))
SINCE = _Since()
SINCE_FORMS = (
    "A time is RFC 3339, a date (midnight UTC), a duration before now (ms, s, m, h, d or w), or nanoseconds "
    "since 1970."
)
PLACE = _Place()
POSITION = click.IntRange(0, NUMBER_MAX)
