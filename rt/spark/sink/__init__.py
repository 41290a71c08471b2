"""Write to a stream from Spark, exactly once."""
