"""What commands report when Spark fails: one line with the cause, instead of a traceback of two languages."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from rt.errors import RtError

_PYTHON: Final = re.compile(r"(?:^|worker: )((?:rt\.[\w.]+|\w+(?:Error|Exception)): .+)$", re.MULTILINE)
"""The last line of a Python traceback, or its only line."""
_JAVA: Final = re.compile(r"^Caused by: (.+)$", re.MULTILINE)
_CHARACTERS_MAX: Final = 1000


@contextlib.contextmanager
def spark_errors(problem: str, where: str | None, hint: str) -> Iterator[None]:
    """Convert the errors of Spark and its JVM to `rt.RtError`. Other errors pass unchanged."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        raise RtError(problem, where=where, got=cause_of(error).rstrip("."), hint=hint) from error


def cause_of(error: Exception) -> str:
    """The last Python error in the report of Spark, else the last Java error, else the first line of the
    report.
    """
    text = str(error)
    found = _PYTHON.findall(text) or _JAVA.findall(text)
    return (found[-1] if found else text.partition("\n")[0])[:_CHARACTERS_MAX]
