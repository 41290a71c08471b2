"""Events on their way to the consumers of one queue."""
