"""rt: reliable transport for streams of messages, on log files.

A publisher appends to log files on its own disk; readers get every byte back, in order. Importing this
package loads neither grpc nor pyspark nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rt import errors, events
from rt.errors import (
    CertificateError,
    Closed,
    ClusterMismatch,
    Damaged,
    DirectoryLocked,
    DiskFull,
    Diverged,
    Fenced,
    FormatError,
    Gap,
    InvalidMessage,
    InvalidName,
    InvalidOption,
    MessageTooLarge,
    NotALog,
    Overloaded,
    ProtocolViolation,
    RtError,
    StorageError,
    StorageFailed,
    Timeout,
    TopicTooLong,
    UnknownVersion,
    WriteConflict,
)
from rt.log.columns import Message, MessageBatch
from rt.log.reader import LogReader
from rt.publisher import Publisher
from rt.subscriber import Subscriber

if TYPE_CHECKING:
    from rt import aio
    from rt.net.tls import TLS

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "CertificateError",
    "Closed",
    "ClusterMismatch",
    "Damaged",
    "DirectoryLocked",
    "DiskFull",
    "Diverged",
    "Fenced",
    "FormatError",
    "Gap",
    "InvalidMessage",
    "InvalidName",
    "InvalidOption",
    "LogReader",
    "Message",
    "MessageBatch",
    "MessageTooLarge",
    "NotALog",
    "Overloaded",
    "ProtocolViolation",
    "Publisher",
    "RtError",
    "StorageError",
    "StorageFailed",
    "Subscriber",
    "Timeout",
    "TopicTooLong",
    "UnknownVersion",
    "WriteConflict",
    "aio",
    "errors",
    "events",
]


def __getattr__(name: str) -> Any:
    """`rt.TLS` and `rt.aio` at their first use: a publisher to files needs neither."""
    if name == "TLS":
        from rt.net.tls import TLS

        return TLS
    if name == "aio":
        import importlib

        return importlib.import_module("rt.aio")
    raise AttributeError(f"module 'rt' has no attribute {name!r}")
