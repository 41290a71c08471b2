"""The options of `format("rt")`: their syntax and meaning.

Names follow Spark's Kafka source and are case-insensitive. Offsets are positions. Invariant: an unknown
option or an invalid value is refused with one line that names the option and its valid values. Nothing is
guessed.

    path (or log)               directory of a merged log: <root>/<stream>/merged
    endpoints                   nodes instead: host:port, comma-separated; requires stream, ca, cert and key
    stream, ca, cert, key       name of the stream; paths of PEM files, valid on every executor

startingOffsets             earliest (default), latest, or a position; {"position": N} as in a checkpoint
endingOffsets               latest (default), or a position, exclusive; batch only startingTimestamp
overrides startingOffsets: the first position with a timestamp at or after it. Milliseconds since the Unix
epoch, or ISO 8601 (2026-01-31T12:00:00Z) endingTimestamp             overrides endingOffsets, exclusive; same
format startingOffsetsByTimestampStrategy   if no message matches: error (default), or latest topics
read only these, comma-separated or a JSON array of strings. Default: all failOnDataLoss              true
(default): missing positions are an error; false: log and continue consumer                    name of a hold,
that of the certificate: the nodes retain, within their limits, what the query's checkpoint does not cover;
only for streams from nodes

maxOffsetsPerTrigger        most messages in a micro-batch. Default: no limit maxBytesPerTrigger
approximate most bytes of log in a micro-batch: 67108864 or 64m (of 1,024 x 1,024) minPartitions
least number of partitions, if there are as many messages maxPartitionBytes           approximate most bytes
of log in a partition. Default: 128m

`startingOffsets` applies only to a new query. A query with a checkpoint continues from it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

from rt.errors import InvalidOption
from rt.log.format.constants import NUMBER_MAX
from rt.names import check_name

MAX_PARTITION_BYTES: Final = 128 * 2**20

_NAMES: Final = (
    "path",
    "log",
    "endpoints",
    "stream",
    "ca",
    "cert",
    "key",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestampStrategy",
    "topics",
    "failOnDataLoss",
    "consumer",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minPartitions",
    "maxPartitionBytes",
)
_KNOWN: Final = {name.lower(): name for name in _NAMES}
_UNITS: Final = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE: Final = re.compile(r"(\d{1,19})\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE)
_KAFKA_PLACES: Final = {-2: "earliest", -1: "latest"}


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first position whose timestamp is at or after `timestamp_ns`, in ns since the Unix epoch."""

    timestamp_ns: int
    option: str


Bound: TypeAlias = int | Literal["earliest", "latest"] | AtTime


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A log directory that every executor sees under the same path."""

    path: str

    def __str__(self) -> str:
        return self.path


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


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The checked options of a query. `end` is "latest" in a stream."""

    where: DirectorySource | ClusterSource
    start: Bound = "earliest"
    end: Bound = "latest"
    latest_if_no_time: bool = False
    topics: frozenset[str] | None = None
    fail_on_data_loss: bool = True
    max_offsets_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_partitions: int = 1
    max_partition_bytes: int = MAX_PARTITION_BYTES
    consumer: str | None = None
    """Only for streams from nodes."""


def parse_options(given: Mapping[str, str], *, streaming: bool | None = None) -> ReadOptions:
    """Parse the options of a batch or streaming query. `streaming` is None if that is not known yet.

    Raises `rt.InvalidOption` for any invalid value.
    """
    options = _known(given)
    if streaming:
        for name in ("endingOffsets", "endingTimestamp"):
            if name in options:
                raise InvalidOption(f"{name} is for batch queries; a stream has no end", where=name)
    start = _bound(options, "starting", "earliest")
    end = _bound(options, "ending", "latest")
    if end == "earliest":
        raise _refused("endingOffsets", "earliest", "latest, or a position")
    if isinstance(start, int) and isinstance(end, int) and end < start:
        raise _refused("endingOffsets", end, f"at least startingOffsets, {start}")
    return ReadOptions(
        _where(options),
        start,
        end,
        _choice(options, "startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
        _topics(options),
        _choice(options, "failOnDataLoss", ("true", "false")) == "true",
        _count(options, "maxOffsetsPerTrigger"),
        _size(options, "maxBytesPerTrigger"),
        _count(options, "minPartitions") or 1,
        _size(options, "maxPartitionBytes") or MAX_PARTITION_BYTES,
        _consumer(options, streaming),
    )


def parse_position(name: str, value: object) -> int:
    """Parse a position as in `startingOffsets` and checkpoints: N or {"position": N}."""
    if isinstance(value, dict) and list(value) == ["position"]:
        value = value["position"]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= NUMBER_MAX:
        raise _refused(name, value, f'a position from 0 to {NUMBER_MAX}, as N or {{"position": N}}')
    return value


def _known(given: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in given.items():
        name = _KNOWN.get(key.lower())
        if name is None:
            near = difflib.get_close_matches(key.lower(), _KNOWN, 1)
            meant = f"Did you mean {_KNOWN[near[0]]}? " if near else ""
            raise InvalidOption(
                f"unknown option {key!r}", hint=f"{meant}The options are {', '.join(_NAMES)}."
            )
        options[name] = str(value).strip()
    return options


def _where(options: Mapping[str, str]) -> DirectorySource | ClusterSource:
    path, log = options.get("path"), options.get("log")
    if path and log and path != log:
        raise InvalidOption(
            "path and log name different directories", got=log, expected=path, hint="Give one."
        )
    path = path or log
    endpoints = tuple(
        part for part in (each.strip() for each in options.get("endpoints", "").split(",")) if part
    )
    beside = [name for name in ("stream", "ca", "cert", "key") if options.get(name)]
    if path and (endpoints or beside):
        other = "endpoints" if endpoints else beside[0]
        raise InvalidOption(
            f"path and {other} exclude each other",
            hint="Give a directory, or nodes with their stream and TLS files.",
        )
    if path:
        return DirectorySource(path)
    if not endpoints:
        raise InvalidOption(
            "neither path nor endpoints is given",
            hint="path: a directory with a merged log; endpoints: host:port of the stream's nodes.",
        )
    missing = [name for name in ("stream", "ca", "cert", "key") if name not in beside]
    if missing:
        raise InvalidOption(
            f"endpoints needs {', '.join(missing)} as well", hint="ca, cert and key are paths of PEM files."
        )
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise _refused("endpoints", endpoint, "host:port, separated by commas")
    try:
        stream = check_name(options["stream"], kind="stream")
    except ValueError as error:
        raise InvalidOption(f"stream: {error}") from error
    return ClusterSource(endpoints, stream, options["ca"], options["cert"], options["key"])


def _bound(options: Mapping[str, str], which: str, default: Literal["earliest", "latest"]) -> Bound:
    """A timestamp takes precedence over an offset, as in the Kafka source."""
    name = f"{which}Timestamp"
    if name in options:
        return AtTime(_timestamp_ns(name, options[name]), name)
    name = f"{which}Offsets"
    value = options.get(name, default)
    match value.lower():
        case "earliest":
            return "earliest"
        case "latest":
            return "latest"
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        raise _refused(name, value, "earliest, latest, or a position") from None
    if isinstance(parsed, int) and parsed in _KAFKA_PLACES:
        return "earliest" if parsed == -2 else "latest"
    return parse_position(name, parsed)


def _timestamp_ns(name: str, value: str) -> int:
    if re.fullmatch(r"[+-]?\d{1,16}", value):
        nanoseconds = int(value) * 1_000_000
    else:
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            wanted = "milliseconds since the Unix epoch, or ISO 8601 as 2026-01-31T12:00:00Z"
            raise _refused(name, value, wanted) from None
        if when.tzinfo is None:
            raise _refused(name, value, "a time with its zone: 2026-01-31T12:00:00Z, or +01:00 instead of Z")
        apart = when.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
        nanoseconds = (apart.days * 86_400 + apart.seconds) * 1_000_000_000 + apart.microseconds * 1000
    if not -(2**63) <= nanoseconds < 2**63:
        raise _refused(name, value, "a time between the years 1678 and 2262")
    return nanoseconds


def _topics(options: Mapping[str, str]) -> frozenset[str] | None:
    value = options.get("topics")
    if value is None:
        return None
    topics: object = [topic.strip() for topic in value.split(",")]
    if value.startswith("["):
        try:
            topics = json.loads(value)
        except (ValueError, RecursionError):
            topics = None
    if not isinstance(topics, list) or not topics or not all(isinstance(topic, str) for topic in topics):
        raise _refused("topics", value, 'names separated by commas, or a JSON array: ["trade", "quote"]')
    return frozenset(topics)


def _consumer(options: Mapping[str, str], streaming: bool | None) -> str | None:
    value = options.get("consumer")
    if value is None:
        return None
    if not options.get("endpoints"):
        raise InvalidOption(
            "consumer needs endpoints: only nodes can hold messages",
            hint="Give endpoints, stream, ca, cert and key instead of a directory, or leave consumer out.",
        )
    if streaming is False:
        raise InvalidOption(
            "consumer is only for streaming queries: a batch query never releases its hold",
            hint="Leave it out; or use readStream with trigger(availableNow=True), and a checkpoint.",
        )
    try:
        return check_name(value, kind="subscriber")
    except ValueError as error:
        raise InvalidOption(f"consumer: {error}") from error


def _choice(options: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """The first choice is the default."""
    value = options.get(name, choices[0]).lower()
    if value not in choices:
        raise _refused(name, options[name], " or ".join(choices))
    return value


def _count(options: Mapping[str, str], name: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,19}", value) or not int(value):
        raise _refused(name, value, "a number above 0")
    return int(value)


def _size(options: Mapping[str, str], name: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    found = _SIZE.fullmatch(value)
    if found is None or not int(found[1]):
        raise _refused(name, value, "bytes above 0, as 67108864 or 64m")
    return int(found[1]) * _UNITS[found[2].lower()]


def _refused(name: str, got: object, wanted: str) -> InvalidOption:
    return InvalidOption(f"{name} cannot be {str(got)[:100]!r}", expected=wanted)
