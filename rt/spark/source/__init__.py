"""Read a stream with Spark."""
