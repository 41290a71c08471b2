"""The syntax of the options of `df.write.format("rt")` and `writeStream`. docs/spark.md has their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from rt.errors import InvalidOption
from rt.log.format.constants import TOPIC_BYTES_MAX
from rt.spark.options import (
    CLUSTER_OPTIONS,
    CONNECTION_OPTIONS,
    ClusterSource,
    GivenOptions,
    local_path,
    refused,
)

NAME_LENGTH_MAX: Final = 48
"""Session names contain this name, a partition and a disk, and must stay below the limit of session names."""
DELIVERY_TIMEOUT_MS: Final = 600_000
VERSION_MAX: Final = 2**63 - 1

NAMES: Final = (
    *CONNECTION_OPTIONS,
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


class WriteOptions(Struct, frozen=True):
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
    options = GivenOptions(given, NAMES, hidden=_SPARKS_OWN, verbatim="topic")
    ledger = local_path(options.text("ledger"))
    if streaming and not ledger:
        ledger = _ledger_in(options.text("checkpointLocation"))
    missing = options.missing((*CLUSTER_OPTIONS, "name", *(() if ledger else ("ledger",))))
    if missing:
        hint = (
            "ledger: a directory that the driver and all executors see. "
            'Spark does not hand over the options of a table: write with df.write.format("rt").'
        )
        raise InvalidOption(f"a write needs {', '.join(missing)} as well", hint=hint)
    version = options.number("version", 0, VERSION_MAX)
    if streaming and version is not None:
        raise InvalidOption(
            "version is only for batch writes; a stream uses its batch numbers", where="version"
        )
    if not ledger.startswith("/"):
        raise refused("ledger", ledger, "an absolute path of a directory that all executors see")
    topic = options.text("topic") if "topic" in options else None
    if topic is not None and len(topic.encode()) > TOPIC_BYTES_MAX:
        raise refused("topic", topic, f"at most {TOPIC_BYTES_MAX} bytes of UTF-8")
    name = options.name("name", "name")
    if len(name) > NAME_LENGTH_MAX:
        raise refused("name", name, f"at most {NAME_LENGTH_MAX} characters")
    return WriteOptions(
        options.cluster(),
        name,
        ledger,
        options.text("path") or None,
        version,
        topic,
        options.name("dedupId", "dedupId") if "dedupId" in options else None,
        options.seconds("deliveryTimeoutMs", DELIVERY_TIMEOUT_MS),
    )


def _ledger_in(checkpoint: str) -> str:
    """The ledger's path in the checkpoint, if the checkpoint is on a local or mounted file system; otherwise
    empty.
    """
    path = local_path(checkpoint)
    return f"{path.rstrip('/')}/rt" if path.startswith("/") else ""
