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
    └── StorageFailed
        └── CommitUnknown                 it is unknown whether the commit happened

Where a Python collection raises IndexError, KeyError or ValueError, so do these.
"""

from __future__ import annotations

from rt.errors import FormatError, RtError, StorageFailed


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


class CommitUnknown(StorageFailed):
    """The disk failed during a commit. It is unknown whether the commit happened.

    Call `on_save_failed(unknown_outcome=True)`, then open the store again.
    """
