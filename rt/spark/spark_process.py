"""Whether this process belongs to Spark, which starts its own for planning and for tasks."""

from __future__ import annotations

import sys


def is_spark_process() -> bool:
    """Whether Spark started this process."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")
