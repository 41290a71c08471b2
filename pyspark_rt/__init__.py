"""What Spark finds by itself: it imports top-level packages named pyspark_*, and takes their
`DefaultSource`.
"""

from rt.spark.source import RtDataSource as DefaultSource

__all__ = ["DefaultSource"]
