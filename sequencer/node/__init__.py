"""`rt node`: the command, the supervisor and the entry point of its processes."""
