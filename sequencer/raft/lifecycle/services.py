"""Objects that a node gets from the process around it, and objects that its parts share."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec import Struct

from rt.log.disk import REAL, Disk
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.local_member import LocalMembership
from sequencer.raft.core.ports import Network
from sequencer.raft.model.api import StateMachine
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.storage.disk_full import DiskSpace
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.snapshots import SnapshotStore
from sequencer.raft.storage.worker import BackgroundWorker


class NodeEnvironment(Struct, frozen=True):
    """The part of the environment that a simulation replaces."""

    network: Network
    worker: BackgroundWorker
    rng: random.Random
    new_id: Callable[[], bytes]
    disk: Disk = REAL
    fill_segments: bool = False
    """Whether to fill segment files with zeros in advance."""


class NodeServices(Struct, frozen=True):
    """The objects of one run of a node. Used on the loop's thread."""

    config: RaftConfig
    own: LocalMembership
    machine: StateMachine
    raft: SyncObj
    log: DurableLog
    snapshots: SnapshotStore
    space: DiskSpace
    network: Network
    worker: BackgroundWorker
    new_id: Callable[[], bytes]
