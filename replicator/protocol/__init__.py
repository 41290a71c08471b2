"""What is sent on a replication stream, and its bytes."""
