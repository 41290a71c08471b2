"""The errors of queries, under `rt.RtError`.

RtError
├── QueryError
│   ├── QueryExists (ValueError)      the id or name is in use
│   ├── NoSuchQuery (KeyError)        no query, factory, source or sink has this name
│   ├── StateMismatch                 saved state of another operator
│   ├── LateSubscription              a window or group was subscribed to too late
│   ├── LimitExceeded                 an operator would hold more than its limit
│   ├── WrongCount                    too few or too many values
│   ├── NotInBuffer (IndexError)      a replay or acknowledgement of ids that are not kept
│   ├── SequenceGap                   a source with dense ids left some out
│   ├── WrongState                    the engine's state does not allow the call
│   ├── LogConflict                   the transaction log contradicts itself
│   └── QueryFailed                   the stored error of a query
└── Overloaded
    └── Backlogged                    an output is full: the value was not accepted
"""

from __future__ import annotations

from rt.errors import Overloaded, RtError


class QueryError(RtError):
    """Base of the errors of queries."""

    grpc_status = "FAILED_PRECONDITION"


class QueryExists(QueryError, ValueError):
    """The name is in use. Nothing was created."""

    grpc_status = "ALREADY_EXISTS"


class NoSuchQuery(QueryError, KeyError):
    """Nothing has this name."""

    grpc_status = "NOT_FOUND"


class StateMismatch(QueryError):
    """The saved state does not match the query's operators."""

    def __init__(self, what: str, *, where: str, got: object, expected: object) -> None:
        hint = "The factory makes other operators than before. Start the query under another id."
        super().__init__(what, where=where, got=got, expected=expected, hint=hint)


class LateSubscription(QueryError):
    """A window or group must be subscribed to while it is handed out."""


class LimitExceeded(QueryError):
    """An operator would hold more than its limit. Ends the query."""

    grpc_status = "RESOURCE_EXHAUSTED"


class WrongCount(QueryError):
    """There are too few or too many values, for example for `first` or `single`. Ends the query."""

    grpc_status = "OUT_OF_RANGE"


class NotInBuffer(QueryError, IndexError):
    """The buffer does not hold these sequence ids."""

    grpc_status = "OUT_OF_RANGE"


class SequenceGap(QueryError):
    """The source left out the ids in [start, end). No value after them was accepted."""

    grpc_status = "DATA_LOSS"

    def __init__(self, source: str, start: int, end: int) -> None:
        super().__init__(
            "a dense source left out sequence ids",
            where=f"source {source!r}",
            got=f"sequence id {end}",
            expected=start,
            hint="Pass on_gap to continue after the gap.",
        )
        self.start = start
        self.end = end


class WrongState(QueryError):
    """The engine's state does not allow the call."""


class LogConflict(QueryError):
    """Entries of the transaction log contradict each other."""

    grpc_status = "DATA_LOSS"


class QueryFailed(QueryError):
    """The error that ended a query, as stored: only its text is kept."""


def error_text(error: Exception) -> str:
    """What is stored of an error. The same for the `QueryFailed` that replaces it after a recovery."""
    return error.what if isinstance(error, QueryFailed) else f"{type(error).__name__}: {error}"


class Backlogged(Overloaded):
    """An output is full until its consumer acknowledges values. The value was not accepted."""
