"""The errors of queries, under `rt.RtError`.

RtError
├── QueryError
│   ├── QueryExists (ValueError)      the id or name is in use
│   ├── NoSuchQuery (KeyError)        no query, factory, source or sink has this name
│   ├── StateMismatch                 saved state of another operator
│   ├── LateSubscription              a window or group was subscribed to too late
│   ├── LimitExceeded                 an operator would hold more than its limit
│   ├── WrongCount                    too few or too many values
│   ├── InvalidKey (TypeError)        the key of a stage's value is not hashable
│   ├── NotInBuffer (IndexError)      a replay or acknowledgement of ids that are not kept
│   ├── SequenceGap                   a source with dense ids left some out
│   ├── ClockJump                     the time of a value is too far ahead
│   ├── BadTime (ValueError)          `time_of` has no time for a value
│   ├── ValueChanged                  a value was changed after it was emitted
│   ├── WrongState                    the engine's state does not allow the call
│   ├── LogConflict                   the transaction log contradicts itself
│   ├── NotOnSpark (ValueError)       the query cannot run on Spark
│   ├── EngineStopped                 the error policy of a query stopped the engine
│   └── QueryFailed                   the stored error of a query
└── Overloaded
    └── Backlogged                    an output is full: the value was not accepted
        └── TimersPending             too many timers are due before the value
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from rt.errors import Overloaded, RtError

logger = logging.getLogger("rt.query")

T = TypeVar("T")


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


class InvalidKey(QueryError, TypeError):
    """The `key_of` of a stage returned something that is not hashable."""

    grpc_status = "INVALID_ARGUMENT"


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


class ClockJump(QueryError):
    """The time of a value is further ahead than the source allows. The value was not accepted."""

    grpc_status = "OUT_OF_RANGE"


class BadTime(QueryError, ValueError):
    """`time_of` raised for a value, or returned no time from 1970 to 2262. The value was not accepted."""

    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, source: str, sequence_id: int, value: object, got: object) -> None:
        super().__init__(
            "time_of has no time for a value",
            where=f"source {source!r}, sequence id {sequence_id}",
            got=repr(got)[:200],
            expected="ns since the Unix epoch, as an int of 0 or more, below 2^63",
            hint="Fix time_of, or pass on_bad_time to skip such values.",
        )
        self.source = source
        self.sequence_id = sequence_id
        self.value = value


class ValueChanged(QueryError):
    """A value was changed after an operator emitted it. Ends the query, if the engine checks that."""

    def __init__(self, changed_by: str, emitted_by: str, before: str, now: str) -> None:
        super().__init__(
            f"a value of {emitted_by} was changed",
            where=changed_by,
            got=now,
            expected=before,
            hint="Values are shared. Make a new one instead of changing one that was received or emitted.",
        )


class WrongState(QueryError):
    """The engine's state does not allow the call."""


class LogConflict(QueryError):
    """Entries of the transaction log contradict each other."""

    grpc_status = "DATA_LOSS"


class NotOnSpark(QueryError, ValueError):
    """The query, or an operator in it, cannot run on Spark. Nothing was started."""

    grpc_status = "INVALID_ARGUMENT"


class EngineStopped(QueryError):
    """A query with `on_error="stop-engine"` raised an error. The value that it processed was not accepted."""


class StopEngine(BaseException):
    """Propagates out of the operators of all queries. At the call of the engine it becomes
    `EngineStopped`.
    """

    def __init__(self, error: Exception, *, where: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.where = where


class QueryFailed(QueryError):
    """The error that ended a query, as stored: only its text is kept."""


def error_text(error: Exception) -> str:
    """The text that is stored for an error.

    It is the same for the `QueryFailed` that replaces the error after a recovery.
    """
    return error.what if isinstance(error, QueryFailed) else f"{type(error).__name__}: {error}"


class Backlogged(Overloaded):
    """An output is full until its consumer acknowledges values. The value was not accepted."""


class TimersPending(Backlogged):
    """Many timers are due before the value, which was not accepted: its source must send it again.

    A query that never ends at one time, such as `of(1).pipe(repeat())`, must be stopped first.
    """


def call_all(calls: Iterable[Callable[[], T]]) -> bool:
    """Make all calls, even if some raise; then raise the first error. Returns whether any call returned
    true.
    """
    errors: list[Exception] = []
    found = False
    for call in calls:
        try:
            found = bool(call()) or found
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    raise_first(errors)
    return found


def raise_first(errors: list[Exception]) -> None:
    """Raise the first error, if there is one, and log the others."""
    errors.sort(key=lambda error: isinstance(error, Backlogged))  # Other errors are more important.
    for other in errors[1:]:
        logger.error("also_failed error=%r", other)
    if errors:
        raise errors[0]
