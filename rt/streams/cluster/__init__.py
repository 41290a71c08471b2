"""A cluster of nodes whose log is a queue: the copy of the log on this host, the messages from the nodes, and
the hold on the log.
"""
