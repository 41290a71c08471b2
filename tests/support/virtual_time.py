"""The event loop in virtual time, by its short name."""

from rt.streams.simulate.virtual_time import Stuck, VirtualLoop, run

__all__ = ["Stuck", "VirtualLoop", "run"]
