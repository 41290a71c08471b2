"""Reliable queries: operators over streams whose state is kept across restarts.

    Source("trades").pipe(where(…), take(3))    a description of a query
    rt.query.operators                          the operators
    Factories, QueryEngine                      queries with names: started, fed, saved and recovered
    Operator                                    base class of operators; test yours with `rt.testing.queries`

Invariant: the output of a query does not depend on saves, or on crashes of the process.
"""

from __future__ import annotations

from rt.query.checkpoint.edge import InputEdge, OutputEdge
from rt.query.checkpoint.factories import Factories, Recipe
from rt.query.checkpoint.recovery import Mitigation
from rt.query.core.errors import (
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
from rt.query.core.lifecycle import EngineState
from rt.query.core.observable import Applied, Observable, Observer, Transform, applied, pipe
from rt.query.core.operator import Operator
from rt.query.core.reliable import NOTHING, RESUME, ReliableObservable, ReliableObserver, ReliableSubscription
from rt.query.core.scheduler import RealScheduler, Scheduler, VirtualScheduler
from rt.query.core.source import Source
from rt.query.core.subject import Subject
from rt.query.engine import QueryEngine
from rt.query.query_registry import Start

__all__ = [
    "NOTHING",
    "RESUME",
    "Applied",
    "Backlogged",
    "EngineState",
    "Factories",
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
    "Subject",
    "Transform",
    "VirtualScheduler",
    "WrongCount",
    "WrongState",
    "applied",
    "pipe",
]
