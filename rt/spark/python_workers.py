"""Garbage collection, signals and errors in the Python processes of Spark.

Workers are forked once and reused for many tasks.

After each task and each planner call Spark runs a full collection. It walks all objects of the imported
modules, which takes 30 to 60 ms of CPU, as much as reading 30 to 60 MB of messages. Modules live as long as
the process, so the collector is told to skip them.

When a query has enough rows, as with `limit`, Spark closes the socket to which a worker writes. The worker
then ends with a traceback of BrokenPipeError, printed by Spark's own daemon.

Spark puts the whole trace of a Python process in front of the message of an error. It leaves the trace out if
SPARK_HIDE_TRACEBACK is set when it handles the exception. A process of Spark's ends with its first exception,
so no other error loses its trace.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import ParamSpec, TypeVar

from rt.errors import RtError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


@lru_cache(maxsize=1)
def freeze_modules() -> None:
    """Exclude all existing objects from garbage collections. Done once, and only in a process of Spark.

    Call it when everything that a task needs is imported. Reference counting still frees these objects; only
    cycles among them would stay.
    """
    if is_spark_process():
        gc.collect()
        gc.freeze()


@contextlib.contextmanager
def quiet_end() -> Iterator[None]:
    """While a worker of Spark writes rows, a closed socket ends it by SIGPIPE instead of an exception.

    The worker would end in both cases, and Spark starts another one. SIGPIPE prints nothing. gRPC's own
    connections raise no signal. Nothing changes in other processes.
    """
    if not is_spark_process() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    yield
    # The handler is not restored if the rows are abandoned: then this process is ending, and Spark still
    # flushes the socket.
    signal.signal(signal.SIGPIPE, before)


def plain_errors(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Hide the trace of an `rt.RtError` that `function` raises. For a function that Spark calls and that does
    not handle its errors itself.
    """

    @functools.wraps(function)
    def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except RtError:
            hide_trace()
            raise

    return called


def hide_trace() -> None:
    """Hide the trace of an `rt.RtError` that ends this process of Spark. Does nothing in other processes."""
    if is_spark_process():
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"


def is_spark_process() -> bool:
    """Whether this process belongs to Spark, which starts its own for planning and for tasks."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")
