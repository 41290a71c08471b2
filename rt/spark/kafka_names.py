"""Names of options of Spark's Kafka source and sink, for users who change from Kafka to rt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rt.errors import InvalidOption

_TLS: Final = "ca, cert and key, paths of PEM files"
_CONSUMER: Final = "consumer, a name for which nodes hold messages; progress is in the checkpoint"
_PACE: Final = "trigger(processingTime=…) of the query"
_NONE: Final = "nothing: leave it out"

_HERE: Final = {
    "kafka.bootstrap.servers": "endpoints, the nodes as host:port",
    "bootstrap.servers": "endpoints, the nodes as host:port",
    "subscribe": "stream, and topics to read only some of its topics",
    "subscribepattern": "stream, and a filter on the column topic: where(\"topic rlike '…'\")",
    "assign": "stream, and topics to read only some of its topics",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "groupidprefix": _CONSUMER,
    "group.id": _CONSUMER,
    "kafka.group.id": _CONSUMER,
    "minoffsetspertrigger": _PACE,
    "maxtriggerdelay": _PACE,
    "maxrecordsperpartition": "maxPartitionBytes",
    "includeheaders": "nothing: a write publishes the column headers, if there is one",
    "kafkaconsumer.polltimeoutms": "connectTimeoutMs",
    "fetchoffset.numretries": "connectTimeoutMs",
    "fetchoffset.retryintervalms": "connectTimeoutMs",
    "kafka.request.timeout.ms": "connectTimeoutMs",
    "kafka.delivery.timeout.ms": "deliveryTimeoutMs",
    "kafka.transactional.id": "name; each row is merged once",
    "kafka.enable.idempotence": "name; each row is merged once",
    "kafka.auto.offset.reset": "startingOffsets",
    "auto.offset.reset": "startingOffsets",
}
_PREFIXES: Final = {
    "kafka.ssl.": _TLS,
    "kafka.sasl.": _TLS,
    "kafka.security.": _TLS,
    "kafka.": _NONE,
}
"""The first prefix that matches applies."""


def kafka_error(unknown: Sequence[str], names: Sequence[str]) -> InvalidOption | None:
    """The error that names the options to use instead of Kafka's options among `unknown`; None if `unknown`
    has no option of Kafka.

    `names` are the options that exist here.
    """
    found = {key: here for key in unknown if (here := _instead(key.lower())) is not None}
    if not found:
        return None
    told = "; ".join(f"{key} → {here}" for key, here in found.items())
    return InvalidOption(
        f"unknown option {', '.join(map(repr, found))}: an option of Spark's Kafka source",
        expected=f"the options of rt: {told}",
        hint=f"All options: {', '.join(names)}.",
    )


def _instead(key: str) -> str | None:
    if key in _HERE:
        return _HERE[key]
    return next((here for prefix, here in _PREFIXES.items() if key.startswith(prefix)), None)
