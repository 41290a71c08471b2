"""What the object space raises, below `rt.RtError`.

    RtError
    ├── ObjectError
    │   ├── ObjectExists (ValueError)     create: the id is taken, by whatever kind
    │   ├── NoSuchObject (KeyError)       get, delete, or an edit of an object that was deleted
    │   ├── WrongKind (TypeError)         that object is a List, say, and not a Queue
    │   ├── WrongType (TypeError)         stored as another type, or by a serializer that is not registered
    │   ├── NotSerializable (TypeError)   a value that would not come back as it is
    │   ├── OutOfTurn                     save, on_saved, load … in an order that makes no sense
    │   └── StateDamaged (FormatError)    what is stored fails a check
    └── StorageFailed
        └── CommitUnknown                 a commit that may have happened or not

What a collection of Python raises in the same place (IndexError, KeyError, ValueError) is raised here too.
"""

from __future__ import annotations

from rt.errors import FormatError, RtError, StorageFailed


class ObjectError(RtError):
    """The object space cannot do that."""

    grpc_status = "FAILED_PRECONDITION"


class ObjectExists(ObjectError, ValueError):
    """An object of that id is in the space already. Nothing was made."""

    grpc_status = "ALREADY_EXISTS"


class NoSuchObject(ObjectError, KeyError):
    """The space holds no object of that id, or no longer."""

    grpc_status = "NOT_FOUND"


class WrongKind(ObjectError, TypeError):
    """The object is of another kind than the one asked for."""


class WrongType(ObjectError, TypeError):
    """The elements of the object are stored as another type than the one asked for, or one nobody
    registered.
    """


class NotSerializable(ObjectError, TypeError):
    """A value that the serializer could not give back as it is. The collection was not changed."""

    grpc_status = "INVALID_ARGUMENT"


class OutOfTurn(ObjectError):
    """A call that must not come now: saves, commits and loads have an order."""


class StateDamaged(ObjectError, FormatError):
    """Stored state fails a check. Never skipped, never guessed: restore the store."""

    grpc_status = "DATA_LOSS"


class CommitUnknown(StorageFailed):
    """The disk failed in the middle of a commit: it may have happened or not.

    Tell the space with `on_save_failed(unknown_outcome=True)`, and open the store again.
    """
