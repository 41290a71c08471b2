"""Disks for tests: in memory, with faults and power cuts on demand."""

from disks.faults import Faults, Operation, PowerCut
from disks.faulty_disk import FaultyDisk
from disks.memory_disk import Keep, MemoryDisk

__all__ = ["Faults", "FaultyDisk", "Keep", "MemoryDisk", "Operation", "PowerCut"]
