"""The push and pull processes of a client: how they start, what they report to whom, the progress file."""
