"""rt: reliable transport for streams of messages, on log files.

A publisher appends to log files on its own disk; readers get every byte back, in order. Importing this
package loads hardly anything: each name brings its module at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rt import errors
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

if TYPE_CHECKING:
    from rt import aio, events
    from rt.log.columns import Message, MessageBatch
    from rt.log.reader import LogReader
    from rt.net.tls import TLS
    from rt.publisher import Publisher
    from rt.subscriber import Subscriber

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


_PLACES: Final = {
    "LogReader": "rt.log.reader",
    "Message": "rt.log.columns",
    "MessageBatch": "rt.log.columns",
    "Publisher": "rt.publisher",
    "Subscriber": "rt.subscriber",
    "TLS": "rt.net.tls",
}
"""Where a name is that is looked for when it is first used: who needs one does not load the others."""


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
