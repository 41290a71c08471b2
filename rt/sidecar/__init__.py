"""The push and pull processes of a client: their start, their reports and receivers, the progress file."""
