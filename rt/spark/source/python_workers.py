"""Tunes garbage collection and signals in Spark's Python workers, which are forked once and reused for many
tasks.

After each task and each planner call Spark runs a full collection. It walks all objects of the imported
modules, which takes 30 to 60 ms of CPU, as much as reading 30 to 60 MB of messages. Modules live as long as
the process, so the collector is told to skip them.

When a query has enough rows, as with `limit`, Spark closes the socket to which a worker writes. The worker
then ends with a traceback of BrokenPipeError, printed by Spark's own daemon.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from functools import lru_cache

from rt.spark.plain_errors import is_spark_process


@lru_cache(maxsize=1)
def freeze_modules() -> None:
    """Exclude all present objects from collections; once, and only in a process of Spark.

    Call it when everything that a task needs is imported. Reference counting still frees these objects; only
    cycles among them would stay.
    """
    if is_spark_process():
        gc.collect()
        gc.freeze()


@contextlib.contextmanager
def quiet_end() -> Iterator[None]:
    """While a worker of Spark writes rows, a closed socket ends it by SIGPIPE instead of an exception.

    It would end in both cases, and Spark starts another one; this way prints nothing. gRPC's own connections
    raise no signal. Nothing changes in other processes.
    """
    if not is_spark_process() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    yield
    # Not if the rows are abandoned: then this process is ending, and Spark still flushes the socket.
    signal.signal(signal.SIGPIPE, before)
