"""What queries raise, below `rt.RtError`.

RtError
├── QueryError
│   ├── QueryExists (ValueError)      that id is taken, or its name
│   ├── NoSuchQuery (KeyError)        no query, factory, source or sink of that name
│   ├── StateMismatch                 saved state of another operator, or of a newer one
│   ├── LateSubscription              a window or group was subscribed to after it was handed out
│   ├── LimitExceeded                 an operator would hold more than it may
│   ├── NotInBuffer (IndexError)      a replay from, or an acknowledgement of, ids that are not there
│   ├── SequenceGap                   a source that promises dense ids left some out
│   ├── WrongState                    the engine is not in a state to do that
│   ├── LogConflict                   the transaction log says what cannot have happened
│   └── QueryFailed                   why a query ended, as far as it is remembered
└── Overloaded
    └── Backlogged                    an output holds all it may: nothing was taken
"""

from __future__ import annotations

from rt.errors import Overloaded, RtError


class QueryError(RtError):
    """A query, or the engine, cannot do that."""

    grpc_status = "FAILED_PRECONDITION"


class QueryExists(QueryError, ValueError):
    """Something of that name is there already. Nothing was made."""

    grpc_status = "ALREADY_EXISTS"


class NoSuchQuery(QueryError, KeyError):
    """Nothing of that name is there."""

    grpc_status = "NOT_FOUND"


class StateMismatch(QueryError):
    """Saved state that does not belong to the operators of the query as it is built now."""


class LateSubscription(QueryError):
    """Windows and groups begin when they are handed out, and must be subscribed to then or never."""


class LimitExceeded(QueryError):
    """An operator would hold more than its limit. The query ends with this."""

    grpc_status = "RESOURCE_EXHAUSTED"


class WrongCount(QueryError):
    """The first, last, least … of no value, or the single one of several. The query ends with this."""

    grpc_status = "OUT_OF_RANGE"


class NotInBuffer(QueryError, IndexError):
    """Sequence ids that the buffer no longer has, or never had."""

    grpc_status = "OUT_OF_RANGE"


class SequenceGap(QueryError):
    """Ids in [start, end) did not come. Nothing behind them was taken."""

    grpc_status = "DATA_LOSS"

    def __init__(self, source: str, start: int, end: int) -> None:
        super().__init__(
            "a source left out what it had promised",
            where=f"source {source!r}",
            got=f"sequence id {end}",
            wanted=start,
            hint="Give on_gap to go on behind the gap.",
        )
        self.start = start
        self.end = end


class WrongState(QueryError):
    """The engine is doing something that excludes this, or is unloaded."""


class LogConflict(QueryError):
    """Entries of the transaction log that contradict each other."""

    grpc_status = "DATA_LOSS"


class QueryFailed(QueryError):
    """The error that ended a query, when it is told again after a recovery: its text is what was kept."""


class Backlogged(Overloaded):
    """An output holds as much as it may until its consumer acknowledges. Nothing was taken."""
