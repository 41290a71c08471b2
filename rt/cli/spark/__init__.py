"""Commands that run jobs in a Spark session of their own. Each module imports pyspark when it runs."""
