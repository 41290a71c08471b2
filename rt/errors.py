"""The errors that rt raises, one tree.

    RtError
    ├── InvalidName (ValueError)       a stream, session, publisher or dedup name outside the alphabet
    ├── InvalidOption (ValueError)     an option that is not known, or says what cannot be meant
    ├── InvalidMessage (ValueError)    a message that no log may hold
    │   ├── MessageTooLarge
    │   └── TopicTooLong
    ├── Timeout (TimeoutError)         a deadline passed; the outcome may be unknown
    ├── Closed                         used after close, or in a forked child
    ├── Fenced                         a newer life or incarnation of this session took over
    ├── ProtocolViolation              a peer said what the protocol does not allow
    ├── Gap                            messages the reader wanted are gone; `event` says which
    ├── Overloaded                     too much in flight already; nothing was taken
    ├── ClusterMismatch                of another cluster, stream, member or epoch
    ├── Diverged                       a replica differs from the others where all must be equal
    ├── WriteConflict                  a write that is repeated is not the same, or not the next one
    ├── StorageError                   the local disk said no
    │   ├── DiskFull                   nothing half-written counts; works again when space is back
    │   ├── StorageFailed              a write or fsync failed: this object is dead, open it again
    │   ├── DirectoryLocked            another process writes here
    │   └── NotALog                    no log directory at that path
    ├── FormatError                    bytes that do not say what they must
    │   ├── Damaged                    a checksum or a bound fails where the bytes were known to be good
    │   └── UnknownVersion             written by a newer rt
    └── CertificateError               TLS material that cannot be used

Every message says what happened, where, what was got and what was wanted, and what helps. A class says
which gRPC status it travels as and whether the same call may succeed later. Errors pickle whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rt.events import Event


class RtError(Exception):
    """The root of every error that rt raises on purpose.

    `what` is one sentence without a full stop; `where` a file, offset, field or peer; `got` and `wanted`
    the two values that differ; `hint` the command or setting that helps.
    """

    grpc_status: ClassVar[str] = "INTERNAL"
    retriable: ClassVar[bool] = False

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        wanted: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.got = got
        self.wanted = wanted
        self.hint = hint

    def __str__(self) -> str:
        text = self.what
        if self.where is not None:
            text += f" (at {self.where})"
        if self.got is not None:
            text += f": got {self.got}"
        if self.wanted is not None:
            text += f"{', wanted' if self.got is not None else ': wanted'} {self.wanted}"
        return f"{text}. {self.hint}" if self.hint else text

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
    """An option that is not known, that contradicts another, or whose value cannot be meant."""

    grpc_status = "INVALID_ARGUMENT"


class InvalidMessage(RtError, ValueError):
    """A message that no log may hold; nothing of it was taken."""

    grpc_status = "INVALID_ARGUMENT"


class MessageTooLarge(InvalidMessage):
    """A value above the limit on one message."""


class TopicTooLong(InvalidMessage):
    """A topic above 1,024 bytes of UTF-8."""


class Timeout(RtError, TimeoutError):
    """A deadline passed. What was asked for may still happen."""

    grpc_status = "DEADLINE_EXCEEDED"
    retriable = True


class Closed(RtError):
    """The object was closed, or belongs to the parent of this forked process."""

    grpc_status = "FAILED_PRECONDITION"


class Fenced(RtError):
    """A newer life or incarnation of this session took over: the cluster takes no more bytes of this one."""

    grpc_status = "FAILED_PRECONDITION"


class ProtocolViolation(RtError):
    """A peer said what the protocol does not allow: out of bounds, out of order or not readable at all."""

    grpc_status = "INVALID_ARGUMENT"


class Gap(RtError):
    """Messages that the reader wanted cannot be had; `event` says which and why.

    Raised where no `on_event` handler was given. Reading on afterwards goes on behind the gap.
    """

    grpc_status = "DATA_LOSS"

    def __init__(self, what: str, *, event: Event, **details: Any) -> None:
        super().__init__(what, **details)
        self.event = event


class Overloaded(RtError):
    """A bound on what may be in flight is reached. Nothing was taken: try again when some of it is done."""

    grpc_status = "RESOURCE_EXHAUSTED"
    retriable = True


class ClusterMismatch(RtError):
    """What was opened or who connected belongs to another stream, cluster, member or epoch."""

    grpc_status = "FAILED_PRECONDITION"


class Diverged(RtError):
    """This replica differs from the others where all must be equal. It stops, and its files are kept."""

    grpc_status = "DATA_LOSS"


class WriteConflict(RtError):
    """A write that may have been begun before brings something else now, or comes out of its turn.

    Nothing was published by who raises it: it would have lost messages, or published them twice.
    """

    grpc_status = "FAILED_PRECONDITION"


class StorageError(RtError):
    """The local disk, or the directory on it, cannot be used as asked."""


class DiskFull(StorageError):
    """No space (or quota) left. What was written stays; the batch that did not fit was cut off whole.

    `accepted` are the numbers that `publish_many` had taken before the disk was full (empty for
    `publish`): go on behind them when there is space.
    """

    grpc_status = "RESOURCE_EXHAUSTED"
    retriable = True

    def __init__(self, what: str, *, accepted: range = range(0), **details: Any) -> None:
        super().__init__(what, **details)
        self.accepted = accepted


class StorageFailed(StorageError):
    """A write, rename or fsync failed. An fsync is never tried again: open the object anew."""


class DirectoryLocked(StorageError):
    """Another process (or another object of this one) writes in that directory."""

    grpc_status = "FAILED_PRECONDITION"


class NotALog(StorageError):
    """There is no log directory at that path."""

    grpc_status = "NOT_FOUND"


class FormatError(RtError):
    """Bytes that do not say what the format demands."""

    grpc_status = "DATA_LOSS"


class Damaged(FormatError):
    """Bytes that were known to be good fail a check. Never cut, never skipped: restore or refetch them.

    `path` is the file and `offset` the byte where the damaged header, batch or block starts.
    """

    def __init__(self, what: str, *, path: str, offset: int, **details: Any) -> None:
        details.setdefault("where", f"{path}, offset {offset}")
        super().__init__(what, **details)
        self.path = path
        self.offset = offset


class UnknownVersion(FormatError):
    """A file or structure of a version that this rt does not know."""

    grpc_status = "UNIMPLEMENTED"


class CertificateError(RtError):
    """TLS material that is missing, expired, does not belong together or names no rt identity."""

    grpc_status = "UNAUTHENTICATED"
