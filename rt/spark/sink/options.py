"""The syntax of the options of `df.write.format("rt")` and `writeStream`. docs/spark.md has their meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rt.errors import InvalidOption
from rt.log.format.constants import TOPIC_BYTES_MAX
from rt.spark.options import (
    CLUSTER_OPTIONS,
    ClusterSource,
    check_options,
    parse_cluster,
    parse_name,
    parse_number,
    refused,
)

NAME_LENGTH_MAX: Final = 48
"""Session names contain it, a partition and a disk, and must stay below their limit."""
DELIVERY_TIMEOUT_MS: Final = 600_000
VERSION_MAX: Final = 2**63 - 1

NAMES: Final = (
    *CLUSTER_OPTIONS,
    "name",
    "ledger",
    "path",
    "version",
    "topic",
    "dedupId",
    "deliveryTimeoutMs",
)
_SPARKS_OWN: Final = ("checkpointLocation", "queryName")
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
    options = check_options(given, NAMES, hidden=_SPARKS_OWN, verbatim="topic")
    if streaming and not options.get("ledger"):
        options["ledger"] = _ledger_in(options.get("checkpointLocation", ""))
    if missing := [name for name in (*CLUSTER_OPTIONS, "name", "ledger") if not options.get(name)]:
        hint = (
            f"A write needs endpoints, stream, ca, cert, key, name and ledger. See the docs on {missing[0]}."
        )
        raise InvalidOption(f"a write needs {', '.join(missing)} as well", hint=hint)
    version = parse_number(options, "version", 0, VERSION_MAX)
    if streaming and version is not None:
        raise InvalidOption(
            "version is only for batch writes; a stream uses its batch numbers", where="version"
        )
    if not options["ledger"].startswith("/"):
        raise refused("ledger", options["ledger"], "an absolute path of a directory that all executors see")
    topic = options.get("topic")
    if topic is not None and len(topic.encode()) > TOPIC_BYTES_MAX:
        raise refused("topic", topic, f"at most {TOPIC_BYTES_MAX} bytes of UTF-8")
    timeout = parse_number(options, "deliveryTimeoutMs", 1, 10**12)
    name = parse_name(options, "name", "name")
    if len(name) > NAME_LENGTH_MAX:
        raise refused("name", name, f"at most {NAME_LENGTH_MAX} characters")
    return WriteOptions(
        parse_cluster(options),
        name,
        options["ledger"],
        options.get("path") or None,
        version,
        topic,
        parse_name(options, "dedupId", "dedupId") if "dedupId" in options else None,
        (DELIVERY_TIMEOUT_MS if timeout is None else timeout) / 1000,
    )


def _ledger_in(checkpoint: str) -> str:
    """In the checkpoint, if that is on a local or mounted file system; otherwise empty."""
    path = re.sub(r"^file:(//)?(?=/)", "", checkpoint)
    return f"{path.rstrip('/')}/rt" if path.startswith("/") else ""
