"""Streams: many logical streams over a few queues, served by agents that hosts share among them."""
