"""Requests to the host that owns a queue, from other hosts and from operators, and its answers."""
