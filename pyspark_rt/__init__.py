"""Registers rt's data source with Spark, which imports top-level packages named pyspark_* and uses their
`DefaultSource`.
"""

from rt.spark.data_source import RtDataSource as DefaultSource

__all__ = ["DefaultSource"]
