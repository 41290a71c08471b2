"""Kinds of queues, and the mapper from streams to queues."""
