"""The common part of the options for reading and for writing. Pure.

Names are case-insensitive. Invariant: an unknown option or an invalid value is refused with one line that
names the option and its valid values. Nothing is guessed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from rt.endpoints import split_endpoints
from rt.errors import InvalidName, InvalidOption
from rt.names import check_name
from rt.spark.kafka_names import kafka_error

CLUSTER_OPTIONS: Final = ("endpoints", "stream", "ca", "cert", "key")
CONNECTION_OPTIONS: Final = (*CLUSTER_OPTIONS, "connectTimeoutMs")
CONNECT_TIMEOUT_MS: Final = 5_000
_TIMEOUT_MS_MAX: Final = 10**12
_FILE_URL: Final = re.compile(r"^file:(//)?(?=/)")


class ClusterSource(Struct, frozen=True):
    """The nodes of a stream's cluster, and the TLS files."""

    endpoints: tuple[str, ...]
    stream: str
    ca: str
    cert: str
    key: str
    connect_seconds: float = CONNECT_TIMEOUT_MS / 1000
    """How long the driver waits for the first answer of any node."""

    def __str__(self) -> str:
        return f"{self.stream} of {', '.join(self.endpoints)}"


class GivenOptions:
    """The values that a user has given, by their exact names, without surrounding spaces.

    `names` are the known options. `hidden` options are accepted too, but are not listed. The value of the
    option `verbatim` keeps its spaces. `rt.InvalidOption` for unknown names.
    """

    def __init__(
        self,
        given: Mapping[str, str],
        names: Sequence[str],
        *,
        hidden: Sequence[str] = (),
        verbatim: str = "",
    ) -> None:
        known = {name.lower(): name for name in (*names, *hidden)}
        unknown = [key for key in given if key.lower() not in known]
        if error := kafka_error(unknown, names):
            raise error
        for key in unknown:
            near = difflib.get_close_matches(key.lower(), [name.lower() for name in names], 1)
            guess = f"Did you mean {known[near[0]]}? " if near else ""
            raise InvalidOption(f"unknown option {key!r}", hint=f"{guess}The options are {', '.join(names)}.")
        self._values = {known[key.lower()]: str(value) for key, value in given.items()}
        for name, value in self._values.items():
            if name != verbatim:
                self._values[name] = value.strip()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: str = "") -> str:
        """The value; `default` if the option is not given."""
        return self._values.get(name, default)

    def missing(self, names: Sequence[str]) -> list[str]:
        """The options of `names` that are not given, or are empty."""
        return [name for name in names if not self._values.get(name)]

    def name(self, option: str, kind: str) -> str:
        """The value of `option`, which must be a name by the rules of `rt.names`."""
        try:
            return check_name(self._values[option], kind=kind)
        except InvalidName as error:
            raise InvalidOption(f"{option}: {error}") from error

    def number(self, name: str, least: int, most: int, expected: str = "") -> int | None:
        """None if the option is not given."""
        value = self._values.get(name)
        if value is None:
            return None
        if not re.fullmatch(r"\d{1,19}", value) or not least <= int(value) <= most:
            raise refused(name, value, expected or f"a whole number from {least} to {most}")
        return int(value)

    def seconds(self, name: str, default_ms: int) -> float:
        """The seconds of an option that is given in milliseconds."""
        milliseconds = self.number(name, 1, _TIMEOUT_MS_MAX)
        return (default_ms if milliseconds is None else milliseconds) / 1000

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """The first choice is the default."""
        value = self.text(name, choices[0]).lower()
        if value not in choices:
            raise refused(name, self._values[name], " or ".join(choices))
        return value

    def cluster(self) -> ClusterSource:
        """All `CLUSTER_OPTIONS` must be given."""
        ca, cert, key = (self._values[name] for name in ("ca", "cert", "key"))
        return ClusterSource(
            split_endpoints(self._values["endpoints"], where="option endpoints"),
            self.name("stream", "stream"),
            ca,
            cert,
            key,
            self.seconds("connectTimeoutMs", CONNECT_TIMEOUT_MS),
        )


def local_path(path: str) -> str:
    """A path of the local file system. Spark gives some as URLs: `file:/data` or `file:///data`."""
    return _FILE_URL.sub("", path)


def refused(name: str, got: object, expected: str) -> InvalidOption:
    return InvalidOption(f"{name} cannot be {str(got)[:100]!r}", expected=expected)
