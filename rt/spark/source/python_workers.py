"""Tunes garbage collection in Spark's Python workers, which are forked once and reused for many tasks.

After each task and each planner call Spark runs a full collection. It walks all objects of the imported
modules, which takes 30 to 60 ms of CPU, as much as reading 30 to 60 MB of messages. Modules live as long as
the process, so the collector is told to skip them.
"""

from __future__ import annotations

import gc
import sys
from functools import lru_cache


@lru_cache(maxsize=1)
def freeze_modules() -> None:
    """Exclude all present objects from collections; once, and only in a process of Spark.

    Call it when everything that a task needs is imported. Reference counting still frees these objects; only
    cycles among them would stay.
    """
    if _is_of_spark():
        gc.collect()
        gc.freeze()


def _is_of_spark() -> bool:
    """Whether Spark started this process."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")
