"""The errors of the object space, under `rt.RtError`.

    RtError
    ├── ObjectError
    │   ├── ObjectExists (ValueError)     create: the id is in use
    │   ├── NoSuchObject (KeyError)       get, delete, or an edit of a deleted object
    │   ├── WrongKind (TypeError)         the object is a List and not a Queue, for example
    │   ├── WrongType (TypeError)         the stored type is another, or its serializer is not registered
    │   ├── NotSerializable (TypeError)   the value would not be restored unchanged
    │   ├── OutOfTurn                     save, on_saved, load … in the wrong order
    │   └── StateDamaged (FormatError)    stored state fails a check
    └── StorageError
        ├── StoreUnavailable              the server of a store does not answer: try again
        └── StorageFailed
            └── CommitUnknown             it is unknown whether the commit happened

Where a Python collection raises IndexError, KeyError or ValueError, so do these.
"""

from __future__ import annotations

from rt.errors import FormatError, RtError, StorageError, StorageFailed


class ObjectError(RtError):
    """Base of the object space's errors."""

    grpc_status = "FAILED_PRECONDITION"


class ObjectExists(ObjectError, ValueError):
    """An object with this id exists. Nothing was created."""

    grpc_status = "ALREADY_EXISTS"


class NoSuchObject(ObjectError, KeyError):
    """The space has no object with this id."""

    grpc_status = "NOT_FOUND"


class WrongKind(ObjectError, TypeError):
    """The object has another kind than the requested one."""


class WrongType(ObjectError, TypeError):
    """The stored element type is not the requested one, or its serializer is not registered."""


class NotSerializable(ObjectError, TypeError):
    """The serializer cannot restore this value unchanged. The collection was not changed."""

    grpc_status = "INVALID_ARGUMENT"


class OutOfTurn(ObjectError):
    """The call is not allowed now: saves, commits and loads have an order."""


class StateDamaged(ObjectError, FormatError):
    """Stored state fails a check. It is never skipped or repaired: restore the store."""

    grpc_status = "DATA_LOSS"


class StoreUnavailable(StorageError):
    """The server of a store cannot be reached, is busy, or did not answer in time. Nothing was changed."""

    grpc_status = "UNAVAILABLE"
    retriable = True


class CommitUnknown(StorageFailed):
    """The disk, or the connection to the server, failed during a commit. It may have happened or not.

    Call `on_save_failed(unknown_outcome=True)`. Then open a store in a file again. A store on a server finds
    out itself at its next use.
    """
