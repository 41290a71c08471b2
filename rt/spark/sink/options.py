"""The options of `df.write.format("rt")` and `writeStream`: their syntax and meaning.

Names are case-insensitive. Invariant: an unknown option or an invalid value is refused with one line that
names the option and its valid values.

    endpoints                   the nodes: host:port, comma-separated
    stream, ca, cert, key       name of the stream; paths of PEM files, valid on every executor. The
                                certificate must be a publisher's with a dedup id
    name                        name of the writer, at most 48 characters as in other names. Used by one
                                query, or one series of batch writes, at a time
    ledger                      directory shared by the driver and every executor, on a file system with hard
                                links (local, NFS): records the number of each published row. Retries need it:
                                keep it as long as the checkpoint. Default for a stream: rt in its
                                checkpointLocation, if that is such a directory
    path                        directory on each executor's own disk for messages on their way to the nodes.
                                Default: rt-spark in the directory for temporary files
    version                     batch writes: number of this write, higher than earlier ones. Repeating the
                                last write with its number and rows adds nothing. Default: the next number
    topic                       topic of every row, instead of a column
    dedupId                     dedup id to use, if the certificate has several
    deliveryTimeoutMs           how long a task waits until its rows are merged, in ms. Default: 600000
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rt.errors import InvalidName, InvalidOption
from rt.log.format.constants import TOPIC_BYTES_MAX
from rt.names import check_name
from rt.spark.source.options import ClusterSource

NAME_LENGTH_MAX: Final = 48
"""Session names contain it, a partition and a disk, and must stay below their limit."""
DELIVERY_TIMEOUT_MS: Final = 600_000
VERSION_MAX: Final = 2**63 - 1

_NAMES: Final = (
    "endpoints",
    "stream",
    "ca",
    "cert",
    "key",
    "name",
    "ledger",
    "path",
    "version",
    "topic",
    "dedupId",
    "deliveryTimeoutMs",
)
_KNOWN: Final = {name.lower(): name for name in _NAMES}
_SPARKS_OWN: Final = {"checkpointlocation": "checkpointLocation", "queryname": "queryName"}
"""Spark passes these options of a streaming query to the sink."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The checked options of a write."""

    nodes: ClusterSource
    name: str
    ledger: str
    path: str | None = None
    version: int | None = None
    topic: str | None = None
    dedup_id: str | None = None
    delivery_seconds: float = DELIVERY_TIMEOUT_MS / 1000


def parse_write_options(given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """Parse the options. `rt.InvalidOption` for any invalid value."""
    options = _known(given)
    if streaming and not options.get("ledger"):
        options["ledger"] = _ledger_in(options.get("checkpointLocation", ""))
    if missing := [name for name in (*_NAMES[:5], "name", "ledger") if not options.get(name)]:
        hint = (
            f"A write needs endpoints, stream, ca, cert, key, name and ledger. See the docs on {missing[0]}."
        )
        raise InvalidOption(f"a write needs {', '.join(missing)} as well", hint=hint)
    version = _number(options, "version", 0, VERSION_MAX)
    if streaming and version is not None:
        raise InvalidOption(
            "version is only for batch writes; a stream uses its batch numbers", where="version"
        )
    if not options["ledger"].startswith("/"):
        raise _refused("ledger", options["ledger"], "an absolute path of a directory that all executors see")
    topic = options.get("topic")
    if topic is not None and len(topic.encode()) > TOPIC_BYTES_MAX:
        raise _refused("topic", topic, f"at most {TOPIC_BYTES_MAX} bytes of UTF-8")
    timeout = _number(options, "deliveryTimeoutMs", 1, 10**12)
    return WriteOptions(
        _nodes(options),
        _name(options, "name", NAME_LENGTH_MAX),
        options["ledger"],
        options.get("path") or None,
        version,
        topic,
        _name(options, "dedupId", 128) if "dedupId" in options else None,
        (DELIVERY_TIMEOUT_MS if timeout is None else timeout) / 1000,
    )


def _known(given: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in given.items():
        name = _KNOWN.get(key.lower()) or _SPARKS_OWN.get(key.lower())
        if name is None:
            near = difflib.get_close_matches(key.lower(), _KNOWN, 1)
            meant = f"Did you mean {_KNOWN[near[0]]}? " if near else ""
            raise InvalidOption(
                f"unknown option {key!r} for writing", hint=f"{meant}The options are {', '.join(_NAMES)}."
            )
        options[name] = str(value) if name == "topic" else str(value).strip()
    return options


def _ledger_in(checkpoint: str) -> str:
    """In the checkpoint, if that is on a local or mounted file system; otherwise empty."""
    path = re.sub(r"^file:(//)?(?=/)", "", checkpoint)
    return f"{path.rstrip('/')}/rt" if path.startswith("/") else ""


def _nodes(options: Mapping[str, str]) -> ClusterSource:
    endpoints = tuple(part for part in (each.strip() for each in options["endpoints"].split(",")) if part)
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise _refused("endpoints", endpoint, "host:port, separated by commas")
    return ClusterSource(
        endpoints, _name(options, "stream", 128), *(options[name] for name in ("ca", "cert", "key"))
    )


def _name(options: Mapping[str, str], option: str, length_max: int) -> str:
    try:
        name = check_name(options[option], kind=option)
    except InvalidName as error:
        raise InvalidOption(f"{option}: {error}") from error
    if len(name) > length_max:
        raise _refused(option, name, f"at most {length_max} characters")
    return name


def _number(options: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,19}", value) or not low <= int(value) <= high:
        raise _refused(name, value, f"a whole number from {low} to {high}")
    return int(value)


def _refused(name: str, got: object, expected: str) -> InvalidOption:
    return InvalidOption(f"{name} cannot be {str(got)[:100]!r}", expected=expected)
