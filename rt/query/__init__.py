"""Reliable queries: operators over streams, whose state outlives the process.

    Source("trades").pipe(where(…), take(3))    a description
    rt.query.operators                          the operators
    Operator                                    what to derive one from; `rt.testing.queries` checks its laws

Law: what comes out of a query does not depend on how often it was saved, or the process killed.
"""

from __future__ import annotations

from rt.query.errors import (
    Backlogged,
    LateSubscription,
    LimitExceeded,
    LogConflict,
    NoSuchQuery,
    NotInBuffer,
    QueryError,
    QueryExists,
    QueryFailed,
    SequenceGap,
    StateMismatch,
    WrongState,
)
from rt.query.inner import Inner
from rt.query.observing import Applied, Observable, Observer, Transform, applied, pipe
from rt.query.operator import Operator
from rt.query.reliable import (
    NOTHING,
    RESUME,
    ReliableObservable,
    ReliableObserver,
    ReliableSubscription,
)
from rt.query.scheduling import RealScheduler, Scheduler, VirtualScheduler
from rt.query.taps import Source

__all__ = [
    "NOTHING",
    "RESUME",
    "Applied",
    "Backlogged",
    "Inner",
    "LateSubscription",
    "LimitExceeded",
    "LogConflict",
    "NoSuchQuery",
    "NotInBuffer",
    "Observable",
    "Observer",
    "Operator",
    "QueryError",
    "QueryExists",
    "QueryFailed",
    "RealScheduler",
    "ReliableObservable",
    "ReliableObserver",
    "ReliableSubscription",
    "Scheduler",
    "SequenceGap",
    "Source",
    "StateMismatch",
    "Transform",
    "VirtualScheduler",
    "WrongState",
    "applied",
    "pipe",
]
