"""Reliable queries: operators over streams whose state is kept across restarts.

    Source("trades").pipe(where(…), take(3))    a description of a query
    rt.query.operators                          the operators
    Factories, QueryEngine                      queries with names: started, fed, saved and recovered
    Operator                                    base class of operators; test yours with `rt.testing.queries`

Invariant: the output of a query does not depend on saves, or on crashes of the process.
"""

from __future__ import annotations

from rt.query.checkpoint.edge import OutputEdge
from rt.query.checkpoint.error_policy import ErrorPolicy
from rt.query.checkpoint.factories import Factories, Recipe
from rt.query.checkpoint.input_edge import InputEdge
from rt.query.checkpoint.recovery import Mitigation
from rt.query.checkpoint.stage_table import StageOptions
from rt.query.core.clock import EventTime, LateValue, SourceTiming
from rt.query.core.errors import (
    Backlogged,
    BadTime,
    ClockJump,
    EngineStopped,
    InvalidKey,
    LateSubscription,
    LimitExceeded,
    LogConflict,
    NoSuchQuery,
    NotInBuffer,
    NotOnSpark,
    QueryError,
    QueryExists,
    QueryFailed,
    SequenceGap,
    StateMismatch,
    TimersPending,
    ValueChanged,
    WrongCount,
    WrongState,
)
from rt.query.core.key_expiry import KeyExpiry
from rt.query.core.lifecycle import EngineState
from rt.query.core.observable import Applied, Observable, Observer, Transform, applied, pipe
from rt.query.core.operator import Operator
from rt.query.core.reliable import NOTHING, RESUME, ReliableObservable, ReliableObserver, ReliableSubscription
from rt.query.core.scheduler import RealScheduler, Scheduler, VirtualScheduler
from rt.query.core.source import Source
from rt.query.core.subject import Subject
from rt.query.engine import QueryEngine
from rt.query.monitoring.dead_letters import DeadLetter
from rt.query.query_registry import Start

__all__ = [
    "NOTHING",
    "RESUME",
    "Applied",
    "Backlogged",
    "BadTime",
    "ClockJump",
    "DeadLetter",
    "EngineState",
    "EngineStopped",
    "ErrorPolicy",
    "EventTime",
    "Factories",
    "InputEdge",
    "InvalidKey",
    "KeyExpiry",
    "LateSubscription",
    "LateValue",
    "LimitExceeded",
    "LogConflict",
    "Mitigation",
    "NoSuchQuery",
    "NotInBuffer",
    "NotOnSpark",
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
    "SourceTiming",
    "StageOptions",
    "Start",
    "StateMismatch",
    "Subject",
    "TimersPending",
    "Transform",
    "ValueChanged",
    "VirtualScheduler",
    "WrongCount",
    "WrongState",
    "applied",
    "pipe",
]
