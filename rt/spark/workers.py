"""The Python processes that Spark runs a source in: forked once, and used for one task after the other.

Behind each task, and each question of its planner, Spark makes such a process collect its garbage in full:
that walks all that its modules are made of, 30 to 60 ms of a processor each time, as much as 30 to 60 MB of
messages cost. Modules stay as long as the process does, so the collector is told to pass them over.
"""

from __future__ import annotations

import gc
import sys
from functools import lru_cache


@lru_cache(maxsize=1)
def freeze_modules() -> None:
    """Let garbage collections pass over what is there by now; once, and only in a process of Spark's.

    To be called when all is imported that a task needs. An object that is there is freed as ever when its
    last reference goes; only a cycle of such objects would stay.
    """
    if _is_of_spark():
        gc.collect()
        gc.freeze()


def _is_of_spark() -> bool:
    """Whether Spark has started this process, not a user."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")
