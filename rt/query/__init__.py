"""Reliable queries: operators over streams, whose state outlives the process.

    Source("trades").pipe(where(…), take(3))    a description
    rt.query.operators                          the operators
    Factories, QueryEngine                      queries by names, started, fed, saved and recovered
    Operator                                    what to derive one from; `rt.testing.queries` checks its laws

Law: what comes out of a query does not depend on how often it was saved, or the process killed.
"""

from __future__ import annotations

from rt.query.definitions import Factories, Recipe
from rt.query.edges import InputEdge, OutputEdge
from rt.query.engine import QueryEngine
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
    WrongCount,
    WrongState,
)
from rt.query.inner import Inner
from rt.query.observing import Applied, Observable, Observer, Transform, applied, pipe
from rt.query.operator import Operator
from rt.query.queries import Start
from rt.query.recovery import Mitigation
from rt.query.reliable import (
    NOTHING,
    RESUME,
    ReliableObservable,
    ReliableObserver,
    ReliableSubscription,
)
from rt.query.scheduling import RealScheduler, Scheduler, VirtualScheduler
from rt.query.states import EngineState
from rt.query.taps import Source

__all__ = [
    "NOTHING",
    "RESUME",
    "Applied",
    "Backlogged",
    "EngineState",
    "Factories",
    "Inner",
    "InputEdge",
    "LateSubscription",
    "LimitExceeded",
    "LogConflict",
    "Mitigation",
    "NoSuchQuery",
    "NotInBuffer",
    "Observable",
    "Observer",
    "Operator",
    "OutputEdge",
    "QueryEngine",
    "QueryError",
    "QueryExists",
    "QueryFailed",
    "RealScheduler",
    "Recipe",
    "ReliableObservable",
    "ReliableObserver",
    "ReliableSubscription",
    "Scheduler",
    "SequenceGap",
    "Source",
    "Start",
    "StateMismatch",
    "Transform",
    "VirtualScheduler",
    "WrongCount",
    "WrongState",
    "applied",
    "pipe",
]
