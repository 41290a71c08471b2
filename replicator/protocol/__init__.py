"""The messages of a replication stream, and their bytes."""
