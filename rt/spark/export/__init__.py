"""Export to Parquet, and the audit of replicas."""
