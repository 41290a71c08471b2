"""Operators' requests to the cluster: requests that wait, resets, changes of the members. Pure."""
