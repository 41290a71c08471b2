"""A cluster of nodes whose log is a queue: the copy of it on this host, what nodes send, and its hold."""
