"""The options of `df.write.format("rt")` and `writeStream`: what users may say, and what it means.

Case does not matter. Law: what is not known, or cannot be meant, is refused with one line that names the
option and what it may be.

    endpoints                   the nodes: host:port, separated by commas
    stream, ca, cert, key       the stream's name; PEM files, by paths that are good on every executor. The
                                certificate is a publisher's, and names a dedup id
    name                        what the writer is called, by whoever runs it: at most 48 of the letters of
                                names. One query at a time has it, or one series of batch writes
    ledger                      a directory that the driver and every executor see, on a file system with hard
                                links (a local one, NFS): what was written under which number. Without it
                                nobody knows what is to be repeated; keep it as long as the checkpoint. A
                                stream's default: rt in its checkpointLocation, if that is such a directory
    path                        a directory on each executor's own disk, for what is on its way to the nodes
                                (default: rt-spark in the directory for temporary files)
    version                     batch writes: the number of this write, above those before. A write that is
                                made again with the number and the rows of the last one adds nothing. Default:
                                the next number
    topic                       the topic of every row, instead of a column
    dedupId                     which one, if the certificate names several
    deliveryTimeoutMs           how long a task waits until its rows are merged (default: 600000)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rt.errors import InvalidName, InvalidOption
from rt.log.layout import TOPIC_BYTES_MAX
from rt.names import check_name
from rt.spark.options import Nodes

NAME_LENGTH_MAX: Final = 48
"""So that the names of sessions, which carry it, a partition and a disk, stay below their limit."""
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
"""What Spark hands on of a streaming query's own options."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where rows go, and under which name, checked."""

    nodes: Nodes
    name: str
    ledger: str
    path: str | None = None
    version: int | None = None
    topic: str | None = None
    dedup_id: str | None = None
    delivery_seconds: float = DELIVERY_TIMEOUT_MS / 1000


def parse_write_options(given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """What the options say; `rt.InvalidOption` for anything that cannot be meant."""
    options = _known(given)
    if streaming and not options.get("ledger"):
        options["ledger"] = _ledger_in(options.get("checkpointLocation", ""))
    if missing := [name for name in (*_NAMES[:5], "name", "ledger") if not options.get(name)]:
        hint = f"A write wants endpoints, stream, ca, cert, key, name and ledger; {missing[0]}: see the docs."
        raise InvalidOption(f"a write wants {', '.join(missing)} as well", hint=hint)
    version = _number(options, "version", 0, VERSION_MAX)
    if streaming and version is not None:
        raise InvalidOption("version is for batch writes; a stream has its batches' numbers", where="version")
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
                f"there is no option {key!r} for writing", hint=f"{meant}Known are {', '.join(_NAMES)}."
            )
        options[name] = str(value) if name == "topic" else str(value).strip()
    return options


def _ledger_in(checkpoint: str) -> str:
    """In a checkpoint of a local file system, or one mounted by all; nowhere in others."""
    path = re.sub(r"^file:(//)?(?=/)", "", checkpoint)
    return f"{path.rstrip('/')}/rt" if path.startswith("/") else ""


def _nodes(options: Mapping[str, str]) -> Nodes:
    endpoints = tuple(part for part in (each.strip() for each in options["endpoints"].split(",")) if part)
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise _refused("endpoints", endpoint, "host:port, separated by commas")
    return Nodes(endpoints, _name(options, "stream", 128), *(options[name] for name in ("ca", "cert", "key")))


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


def _refused(name: str, got: object, wanted: str) -> InvalidOption:
    return InvalidOption(f"{name} cannot be {str(got)[:100]!r}", wanted=wanted)
