"""Errors that a user of Spark can read: the message of an `rt.RtError`, without the trace of our own calls.

Spark puts the whole trace of a Python process in front of the message. It leaves the trace out if
SPARK_HIDE_TRACEBACK is set when it handles the exception. A process of Spark's ends with its first exception,
so no other error loses its trace.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rt.errors import RtError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def plain_errors(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """For a function that Spark calls and that does not handle what it raises itself."""

    @functools.wraps(function)
    def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except RtError:
            hide_trace()
            raise

    return called


def hide_trace() -> None:
    """For an `rt.RtError` that ends this process of Spark's; nothing in other processes."""
    if is_spark_process():
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"


def is_spark_process() -> bool:
    """Whether this process belongs to Spark, which starts its own for planning and for tasks."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")
