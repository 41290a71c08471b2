"""The errors that rt raises, one tree.

    RtError
    ├── InvalidName (ValueError)       a stream, session, publisher or dedup name outside the alphabet
    ├── InvalidOption (ValueError)     an unknown option, or a value that is not allowed
    ├── InvalidMessage (ValueError)    a message that a log cannot hold
    │   ├── MessageTooLarge
    │   ├── TopicTooLong
    │   └── InvalidHeader
    ├── Timeout (TimeoutError)         a deadline passed; the outcome may be unknown
    ├── Closed                         used after close, or in a forked child
    ├── Fenced                         a newer run of this session, or owner of this store, took over
    ├── ProtocolViolation              a peer sent something that the protocol does not allow
    ├── Gap                            expected messages are not available; `event` says which
    ├── UndecodableValue               a message's value is not what its serializer expects
    ├── HandlerFailed                  the handler of a group failed, and its group stopped
    ├── Overloaded                     too much in flight; nothing was accepted
    │   └── TooManySessions            the cluster has as many open sessions as it allows
    ├── ClusterMismatch                of another cluster, stream, member or epoch
    ├── Diverged                       a replica differs from the others where all must be equal
    ├── WriteConflict                  a repeated write has other contents, or is out of order
    ├── StorageError                   the local disk or directory cannot be used
    │   ├── DiskFull                   no partial batch remains; works again when there is space
    │   │   └── TooManyFiles           no file descriptor left; works again when files are closed
    │   ├── StorageFailed              a write or fsync failed: open the object again
    │   ├── DirectoryLocked            another process writes here
    │   └── LogNotFound                no log directory at that path
    ├── FormatError                    bytes that break the format
    │   ├── BadContents                a batch with valid checksums that cannot be decoded
    │   ├── Corrupt                    bytes that were valid before fail a checksum or a bound
    │   ├── CorruptRange               positions for which a node has no valid bytes
    │   └── UnknownVersion             written by a newer rt
    └── CertificateError               TLS material that cannot be used

Every message says what happened, where, got, expected, and the next step. A class has its gRPC status and
whether the same call may succeed later. Errors can be pickled.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rt.events import Event


class RtError(Exception):
    """The root of every error that rt raises on purpose.

    `what` is one sentence without a full stop. `where` is a file, offset, field or peer. `got` and `expected`
    are the values that differ. `hint` is the command or setting that helps.
    """

    grpc_status: ClassVar[str] = "INTERNAL"
    retriable: ClassVar[bool] = False

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.got = got
        self.expected = expected
        self.hint = hint

    def __str__(self) -> str:
        text = self.what
        if self.where is not None:
            text += f" (at {self.where})"
        if self.got is not None:
            text += f": got {self.got}"
        if self.expected is not None:
            text += f"{', expected' if self.got is not None else ': expected'} {self.expected}"
        # The text of another error, as a part of this one, may end with a hint.
        end = "" if text.endswith((".", "?")) else "."
        return f"{text}{end} {self.hint}" if self.hint else text

    @property
    def reason(self) -> str:
        """A description of what happened, without the location and without the hint."""
        return self.what if self.got is None else f"{self.what}: got {self.got}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (type(self), self.args, dict(self.__dict__)))


def _restore(kind: type[RtError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RtError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class InvalidName(RtError, ValueError):
    """A name outside `[A-Za-z0-9][A-Za-z0-9._-]{0,127}` (sessions may add `~` and a suffix)."""

    grpc_status = "INVALID_ARGUMENT"


class InvalidOption(RtError, ValueError):
    """An option that is unknown, contradicts another, or has a value that is not allowed."""

    grpc_status = "INVALID_ARGUMENT"


class InvalidMessage(RtError, ValueError):
    """A message that a log cannot hold. No part of it was accepted."""

    grpc_status = "INVALID_ARGUMENT"


class MessageTooLarge(InvalidMessage):
    """A value above the limit on one message."""


class TopicTooLong(InvalidMessage):
    """A topic above 1,024 bytes of UTF-8."""


class InvalidHeader(InvalidMessage):
    """Headers above their limits, or a header with an invalid key."""


class Timeout(RtError, TimeoutError):
    """A deadline passed. The operation may still complete."""

    grpc_status = "DEADLINE_EXCEEDED"
    retriable = True


class Closed(RtError):
    """The object was closed, or belongs to the parent of this forked process."""

    grpc_status = "FAILED_PRECONDITION"


def closed_in_child(what: str, where: str | None = None) -> Closed:
    """The error for a forked child that uses an object of its parent."""
    hint = "Open one in the child, or start processes by spawn."
    return Closed(f"{what} belongs to the parent process", where=where, hint=hint)


class Fenced(RtError):
    """A newer run or incarnation of this session took over, or a newer owner of this store.

    All data of this one is rejected.
    """

    grpc_status = "FAILED_PRECONDITION"


class ProtocolViolation(RtError):
    """A peer sent something that is out of bounds, out of order or not readable."""

    grpc_status = "INVALID_ARGUMENT"


class Gap(RtError):
    """Expected messages are not available; `event` says which and why.

    Raised if no `on_event` handler was given. The next read continues after the gap.
    """

    grpc_status = "DATA_LOSS"

    def __init__(self, what: str, *, event: Event, **details: Any) -> None:
        super().__init__(what, **details)
        self.event = event


class UndecodableValue(RtError):
    """The value of a message is not what the serializer expects. `where` names the message."""

    grpc_status = "DATA_LOSS"


class HandlerFailed(RtError):
    """A handler of a group failed for a message, which was not acknowledged. `__cause__` is its error."""

    grpc_status = "ABORTED"


class Overloaded(RtError):
    """A limit on requests or bytes in flight is reached. Nothing was accepted: try again later."""

    grpc_status = "RESOURCE_EXHAUSTED"
    retriable = True


class TooManySessions(Overloaded):
    """The cluster has as many open sessions as its configuration allows, in total or for one name.

    The client retries until a session is closed. An operator can close sessions or raise the limit.
    """


class ClusterMismatch(RtError):
    """A directory or a peer belongs to another stream, cluster, member or epoch."""

    grpc_status = "FAILED_PRECONDITION"


class Diverged(RtError):
    """This replica differs from the others where all must be equal. It stops and keeps its files."""

    grpc_status = "DATA_LOSS"


class WriteConflict(RtError):
    """A repeated write has other contents than the first time, or a write is out of order.

    The writer published nothing: it would have lost or duplicated messages.
    """

    grpc_status = "FAILED_PRECONDITION"


class StorageError(RtError):
    """The local disk, or a directory on it, cannot be used."""


class DiskFull(StorageError):
    """No space (or quota) left. Earlier writes stay; the batch that did not fit was removed completely.

    `accepted` are the numbers that `publish_many` had accepted before the disk was full (empty for
    `publish`): continue after them when there is space.
    """

    grpc_status = "RESOURCE_EXHAUSTED"
    retriable = True

    def __init__(self, what: str, *, accepted: range = range(0), **details: Any) -> None:
        super().__init__(what, **details)
        self.accepted = accepted


class TooManyFiles(DiskFull):
    """The process or the machine has no file descriptor left. The disk is not at fault.

    As with `DiskFull`, no partial batch remains, and the same call works when files are closed.
    """


class StorageFailed(StorageError):
    """A write, rename or fsync failed. An fsync is never retried: open the object again."""


class DirectoryLocked(StorageError):
    """Another process, or another object of this process, writes in that directory."""

    grpc_status = "FAILED_PRECONDITION"


class LogNotFound(StorageError):
    """There is no log directory at that path."""

    grpc_status = "NOT_FOUND"


class FormatError(RtError):
    """Bytes that break the format."""

    grpc_status = "DATA_LOSS"


class BadContents(FormatError):
    """A batch with valid checksums that no reader can decode. Its writer is at fault, not a disk.

    Nodes reject such a batch and everything after it in its session.
    """

    grpc_status = "INVALID_ARGUMENT"


class Corrupt(FormatError):
    """Bytes that were valid before fail a check. Restore or fetch them again; rt never cuts or skips them.

    `path` is the file and `offset` the byte where the corrupt header, batch or block starts.
    """

    def __init__(self, what: str, *, path: str, offset: int, **details: Any) -> None:
        details.setdefault("where", f"{path}, offset {offset}")
        super().__init__(what, **details)
        self.path = path
        self.offset = offset


class CorruptRange(FormatError):
    """A node has no valid bytes for positions `start` to `end` (exclusive). Other nodes may have them."""

    def __init__(self, what: str, *, start: int = 0, end: int = 0, **details: Any) -> None:
        super().__init__(what, **details)
        self.start = start
        self.end = end


class UnknownVersion(FormatError):
    """A file or structure of a version that this rt does not support."""

    grpc_status = "UNIMPLEMENTED"


@contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Add the file that was read to an `UnknownVersion` that the block raises."""
    try:
        yield
    except UnknownVersion as error:
        error.where = path
        raise


class CertificateError(RtError):
    """TLS material that is missing, expired, does not belong together or names no rt identity."""

    grpc_status = "UNAUTHENTICATED"
