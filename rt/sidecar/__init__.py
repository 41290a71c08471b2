"""The push and pull processes of a client: how they start, what they report, the progress file."""
