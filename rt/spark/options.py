"""What the options of reading and of writing have in common. Pure.

Names are case-insensitive. Invariant: an unknown option or an invalid value is refused with one line that
names the option and its valid values. Nothing is guessed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rt.endpoints import split_endpoints
from rt.errors import InvalidName, InvalidOption
from rt.names import check_name

CLUSTER_OPTIONS = ("endpoints", "stream", "ca", "cert", "key")


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """The nodes of a stream's cluster, and the TLS files."""

    endpoints: tuple[str, ...]
    stream: str
    ca: str
    cert: str
    key: str

    def __str__(self) -> str:
        return f"{self.stream} of {', '.join(self.endpoints)}"


def check_options(
    given: Mapping[str, str], names: Sequence[str], *, hidden: Collection[str] = (), verbatim: str = ""
) -> dict[str, str]:
    """The values by their exact names, without surrounding spaces. `rt.InvalidOption` for unknown names.

    `hidden` names are accepted too, and not listed. The value of `verbatim` keeps its spaces.
    """
    known = {name.lower(): name for name in (*names, *hidden)}
    options: dict[str, str] = {}
    for key, value in given.items():
        name = known.get(key.lower())
        if name is None:
            near = difflib.get_close_matches(key.lower(), [name.lower() for name in names], 1)
            guess = f"Did you mean {known[near[0]]}? " if near else ""
            hint = f"{guess}The options are {', '.join(names)}."
            raise InvalidOption(f"unknown option {key!r}", hint=hint)
        options[name] = str(value) if name == verbatim else str(value).strip()
    return options


def parse_cluster(options: Mapping[str, str]) -> ClusterSource:
    """All `CLUSTER_OPTIONS` must be given."""
    files = (options[name] for name in ("ca", "cert", "key"))
    endpoints = split_endpoints(options["endpoints"], where="option endpoints")
    return ClusterSource(endpoints, parse_name(options, "stream", "stream"), *files)


def parse_name(options: Mapping[str, str], option: str, kind: str) -> str:
    try:
        return check_name(options[option], kind=kind)
    except InvalidName as error:
        raise InvalidOption(f"{option}: {error}") from error


def parse_number(
    options: Mapping[str, str], name: str, least: int, most: int, expected: str = ""
) -> int | None:
    """None if the option is not given."""
    value = options.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,19}", value) or not least <= int(value) <= most:
        raise refused(name, value, expected or f"a whole number from {least} to {most}")
    return int(value)


def refused(name: str, got: object, expected: str) -> InvalidOption:
    return InvalidOption(f"{name} cannot be {str(got)[:100]!r}", expected=expected)
