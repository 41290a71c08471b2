"""rt: reliable transport for streams of messages, on log files.

A publisher appends to log files on its own disk. Readers get every byte back, in order. Importing this
package is cheap: each name loads its module at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rt import errors
from rt.errors import (
    BadContents,
    CertificateError,
    Closed,
    ClusterMismatch,
    Corrupt,
    CorruptRange,
    DirectoryLocked,
    DiskFull,
    Diverged,
    Fenced,
    FormatError,
    Gap,
    HandlerFailed,
    InvalidHeader,
    InvalidMessage,
    InvalidName,
    InvalidOption,
    LogNotFound,
    MessageTooLarge,
    Overloaded,
    ProtocolViolation,
    RtError,
    StorageError,
    StorageFailed,
    Timeout,
    TooManyFiles,
    TooManySessions,
    TopicTooLong,
    UndecodableValue,
    UnknownVersion,
    WriteConflict,
)

if TYPE_CHECKING:
    from rt import aio, events
    from rt.client.follow_reader import SubscriberStats
    from rt.client.publisher import Publisher
    from rt.client.publisher_status import PublisherStats, PublisherStatus
    from rt.client.subscriber import Subscriber
    from rt.log.read.reader import LogReader
    from rt.log.scan.message_batch import Message, MessageBatch
    from rt.net.tls import TLS
    from rt.serializers import (
        AvroSerializer,
        JsonSerializer,
        MsgpackSerializer,
        ProtobufSerializer,
        Serializer,
        decode,
    )
    from rt.sidecar.protocol import EndpointStatus
    from rt.stream_client import Client, connect
    from rt.streams.group.group import Group
    from rt.streams.group.options import GroupOptions, HandlerFailure

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "AvroSerializer",
    "BadContents",
    "CertificateError",
    "Client",
    "Closed",
    "ClusterMismatch",
    "Corrupt",
    "CorruptRange",
    "DirectoryLocked",
    "DiskFull",
    "Diverged",
    "EndpointStatus",
    "Fenced",
    "FormatError",
    "Gap",
    "Group",
    "GroupOptions",
    "HandlerFailed",
    "HandlerFailure",
    "InvalidHeader",
    "InvalidMessage",
    "InvalidName",
    "InvalidOption",
    "JsonSerializer",
    "LogNotFound",
    "LogReader",
    "Message",
    "MessageBatch",
    "MessageTooLarge",
    "MsgpackSerializer",
    "Overloaded",
    "ProtobufSerializer",
    "ProtocolViolation",
    "Publisher",
    "PublisherStats",
    "PublisherStatus",
    "RtError",
    "Serializer",
    "StorageError",
    "StorageFailed",
    "Subscriber",
    "SubscriberStats",
    "Timeout",
    "TooManyFiles",
    "TooManySessions",
    "TopicTooLong",
    "UndecodableValue",
    "UnknownVersion",
    "WriteConflict",
    "aio",
    "connect",
    "decode",
    "errors",
    "events",
]


_PLACES: Final = {
    "Client": "rt.stream_client",
    "EndpointStatus": "rt.sidecar.protocol",
    "connect": "rt.stream_client",
    "LogReader": "rt.log.read.reader",
    "Message": "rt.log.scan.message_batch",
    "MessageBatch": "rt.log.scan.message_batch",
    "Publisher": "rt.client.publisher",
    "PublisherStats": "rt.client.publisher_status",
    "PublisherStatus": "rt.client.publisher_status",
    "SubscriberStats": "rt.client.follow_reader",
    "Subscriber": "rt.client.subscriber",
    "TLS": "rt.net.tls",
    **dict.fromkeys(
        (
            "AvroSerializer",
            "JsonSerializer",
            "MsgpackSerializer",
            "ProtobufSerializer",
            "Serializer",
            "decode",
        ),
        "rt.serializers",
    ),
    "Group": "rt.streams.group.group",
    "GroupOptions": "rt.streams.group.options",
    "HandlerFailure": "rt.streams.group.options",
}
"""Names that load their module at first use."""


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        value = getattr(import_module(_PLACES[name]), name)
    elif name in __all__:
        value = import_module(f"rt.{name}")
    else:
        raise AttributeError(f"module 'rt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
