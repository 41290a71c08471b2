"""The syntax of the options of `spark.read.format("rt")` and `readStream`. docs/spark.md has their meaning.

Names follow Spark's Kafka source. Offsets are positions. `startingOffsets` applies only to a new query: a
query with a checkpoint continues from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from rt.errors import InvalidOption
from rt.spark.options import (
    CLUSTER_OPTIONS,
    CONNECTION_OPTIONS,
    ClusterSource,
    GivenOptions,
    local_path,
    refused,
)
from rt.spark.source.columns import timestamp_ns
from rt.spark.source.offset import Offset, parse_start

MAX_PARTITION_BYTES: Final = 128 * 2**20
COUNT_MAX: Final = 10**19 - 1

NAMES: Final = (
    "path",
    "log",
    *CONNECTION_OPTIONS,
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestampStrategy",
    "topics",
    "includeHeaders",
    "failOnDataLoss",
    "consumer",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minPartitions",
    "maxPartitionBytes",
)
_NO_SOURCE_HINT: Final = (
    "path: a directory with a merged log; endpoints: host:port of the stream's nodes. A table needs them in "
    "OPTIONS, and no list of columns: Spark does not hand over the options of a table that has one."
)
_UNITS: Final = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE: Final = re.compile(r"(\d{1,19})\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE)
_KAFKA_PLACES: Final = {-2: "earliest", -1: "latest"}


class AtTime(Struct, frozen=True):
    """The first position whose timestamp is at or after `timestamp_ns`, in ns since the Unix epoch."""

    timestamp_ns: int
    option: str


Bound: TypeAlias = Offset | Literal["earliest", "latest"] | AtTime


class DirectorySource(Struct, frozen=True):
    """A log directory that every executor sees under the same path."""

    path: str

    def __str__(self) -> str:
        return self.path


class ReadOptions(Struct, frozen=True):
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
    include_headers: bool = False
    """Whether the column `headers` is read without a user's schema."""

    @property
    def epoch(self) -> int:
        """The latest epoch in which the bounds were right; 0 if no bound has an epoch."""
        return max((bound.epoch for bound in (self.start, self.end) if isinstance(bound, Offset)), default=0)


def parse_options(given: Mapping[str, str], *, streaming: bool | None = None) -> ReadOptions:
    """Parse the options of a batch or streaming query. `streaming` is None if that is not known yet.

    Raises `rt.InvalidOption` for any invalid value.
    """
    options = GivenOptions(given, NAMES)
    if streaming:
        for name in ("endingOffsets", "endingTimestamp"):
            if name in options:
                raise InvalidOption(f"{name} is for batch queries; a stream has no end", where=name)
    start = _bound(options, "starting", "earliest")
    end = _bound(options, "ending", "latest")
    if end == "earliest":
        raise refused("endingOffsets", "earliest", "latest, or a position")
    if isinstance(start, Offset) and isinstance(end, Offset) and end.position < start.position:
        raise refused("endingOffsets", end.position, f"at least startingOffsets, {start.position}")
    return ReadOptions(
        _where(options),
        start,
        end,
        options.choice("startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
        _topics(options),
        options.choice("failOnDataLoss", ("true", "false")) == "true",
        options.number("maxOffsetsPerTrigger", 1, COUNT_MAX, "a number above 0"),
        _size(options, "maxBytesPerTrigger"),
        options.number("minPartitions", 1, COUNT_MAX, "a number above 0") or 1,
        _size(options, "maxPartitionBytes") or MAX_PARTITION_BYTES,
        _consumer(options, streaming),
        options.choice("includeHeaders", ("false", "true")) == "true",
    )


def _where(options: GivenOptions) -> DirectorySource | ClusterSource:
    path, log = (local_path(options.text(name)) for name in ("path", "log"))
    if path and log and path != log:
        raise InvalidOption(
            "path and log name different directories", got=log, expected=path, hint="Give one."
        )
    path = path or log
    missing = options.missing(CLUSTER_OPTIONS)
    of_cluster = [name for name in CLUSTER_OPTIONS if name not in missing]
    if path and of_cluster:
        raise InvalidOption(
            f"path and {of_cluster[0]} exclude each other",
            hint="Give a directory, or nodes with their stream and TLS files.",
        )
    if "://" in path:
        raise refused("path", path, "a directory of a local or mounted file system")
    if path:
        return DirectorySource(path)
    if "endpoints" in missing:
        raise InvalidOption("neither path nor endpoints is given", hint=_NO_SOURCE_HINT)
    if missing:
        raise InvalidOption(
            f"endpoints needs {', '.join(missing)} as well", hint="ca, cert and key are paths of PEM files."
        )
    return options.cluster()


def _bound(options: GivenOptions, which: str, default: Literal["earliest", "latest"]) -> Bound:
    """A timestamp takes precedence over an offset, as in the Kafka source."""
    name = f"{which}Timestamp"
    if name in options:
        return AtTime(_parse_timestamp(name, options.text(name)), name)
    name = f"{which}Offsets"
    value = options.text(name, default)
    match value.lower():
        case "earliest":
            return "earliest"
        case "latest":
            return "latest"
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        raise refused(name, value, "earliest, latest, or a position") from None
    if isinstance(parsed, int) and parsed in _KAFKA_PLACES:
        return "earliest" if parsed == -2 else "latest"
    return parse_start(name, parsed)


def _parse_timestamp(name: str, value: str) -> int:
    if re.fullmatch(r"[+-]?\d{1,16}", value):
        nanoseconds = int(value) * 1_000_000
    else:
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            expected = "milliseconds since the Unix epoch, or ISO 8601 as 2026-01-31T12:00:00Z"
            raise refused(name, value, expected) from None
        if when.tzinfo is None:
            raise refused(name, value, "a time with its zone: 2026-01-31T12:00:00Z, or +01:00 instead of Z")
        nanoseconds = timestamp_ns(when)
    if not -(2**63) <= nanoseconds < 2**63:
        raise refused(name, value, "a time between the years 1678 and 2262")
    return nanoseconds


def _topics(options: GivenOptions) -> frozenset[str] | None:
    if "topics" not in options:
        return None
    value = options.text("topics")
    topics: object = [topic.strip() for topic in value.split(",")]
    if value.startswith("["):
        try:
            topics = json.loads(value)
        except (ValueError, RecursionError):
            topics = None
    if not isinstance(topics, list) or not topics or not all(isinstance(topic, str) for topic in topics):
        raise refused("topics", value, 'names separated by commas, or a JSON array: ["trade", "quote"]')
    return frozenset(topics)


def _consumer(options: GivenOptions, streaming: bool | None) -> str | None:
    if "consumer" not in options:
        return None
    if not options.text("endpoints"):
        raise InvalidOption(
            "consumer needs endpoints: only nodes can hold messages",
            hint="Give endpoints, stream, ca, cert and key instead of a directory, or leave consumer out.",
        )
    if streaming is False:
        raise InvalidOption(
            "consumer is only for streaming queries: a batch query never releases its hold",
            hint="Leave it out; or use readStream with trigger(availableNow=True), and a checkpoint.",
        )
    return options.name("consumer", "subscriber")


def _size(options: GivenOptions, name: str) -> int | None:
    if name not in options:
        return None
    value = options.text(name)
    found = _SIZE.fullmatch(value)
    if found is None or not int(found[1]):
        raise refused(name, value, "bytes above 0, as 67108864 or 64m")
    return int(found[1]) * _UNITS[found[2].lower()]
