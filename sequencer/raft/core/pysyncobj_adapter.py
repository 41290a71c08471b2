"""Adapters of this package for PySyncObj's log, transport, command queue and clock.

Invariant: PySyncObj's own code appends, truncates, sends and reads the clock only through this module.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from pysyncobj import syncobj
from pysyncobj.config import SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from sequencer.raft.core.ports import Network
from sequencer.raft.core.voter_disks import VoterDisks
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import Forward, LogIndex, RaftEntry, RequestVote
from sequencer.raft.storage.log import DurableLog

PYSYNCOBJ_VERSION: Final = "0.3.17"

if VERSION != PYSYNCOBJ_VERSION:
    raise ImportError(f"sequencer.raft needs PySyncObj {PYSYNCOBJ_VERSION}, not {VERSION}")


syncobj.monotonicTime = time.monotonic  # All other code here uses this clock. It is also faster.
COMMANDS_MAX: Final = 100_000
"""Maximum number of commands that wait to be appended or forwarded. Nodes have far fewer in flight."""


def now() -> float:
    """Seconds on PySyncObj's clock, which never goes back. A simulation may replace it."""
    seconds: float = syncobj.monotonicTime()
    return seconds


@contextlib.contextmanager
def clock(read: Callable[[], float]) -> Iterator[None]:
    """Replace PySyncObj's clock for every node of this process."""
    real = syncobj.monotonicTime
    syncobj.monotonicTime = read
    try:
        yield
    finally:
        syncobj.monotonicTime = real


def pysyncobj_settings(config: RaftConfig) -> SyncObjConf:
    election_s_max = config.election_ms_max / 1000
    return SyncObjConf(
        autoTick=False,
        raftMinTimeout=config.election_ms_min / 1000,
        raftMaxTimeout=election_s_max,
        leaderFallbackTimeout=election_s_max,
        connectionTimeout=election_s_max,
        appendEntriesPeriod=config.heartbeat_ms / 1000,
    )


class Journal:
    """The durable log, as PySyncObj's journal."""

    def __init__(self, log: DurableLog, admissions: VoterDisks) -> None:
        self._log, self._voter_disks = log, admissions

    def add(self, content: bytes, index: int, term: int) -> None:
        entry = RaftEntry(content, index, term)
        self._log.append(entry)
        self._voter_disks.on_appended(entry)

    def truncate(self, index: int) -> None:
        self._log.truncate(index)
        self._voter_disks.on_truncated(index)

    def reset(self, base: LogIndex) -> None:
        self._log.reset(base)
        self._voter_disks.on_truncated(0)

    # PySyncObj's names

    def __len__(self) -> int:
        return len(self._log)

    def __getitem__(self, item: Any) -> Any:
        return self._log[item]

    def setCurrentTerm(self, term: int, voted_for: str | None) -> None:
        self._log.set_term(term, voted_for)

    def setRaftCommitIndex(self, index: int) -> None:
        """Not stored: after a restart only the snapshot is known to be committed."""

    def onOneSecondTimer(self) -> None:
        """Nothing to do."""

    def _destroy(self) -> None:
        """Do nothing: the node closes the log."""


class Peer(Node):  # type: ignore[misc]  # PySyncObj is untyped
    """A member, as PySyncObj's node. Each member has one object, so identity is equality."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class KnownPeers(dict[str, Peer]):
    """Every peer that this node ever knew. They are few: each is a node with a certificate of the stream."""

    def __missing__(self, name: str) -> Peer:
        peer = self[name] = Peer(name)
        return peer


class CommandQueue:
    """PySyncObj's command queue, for one thread, with a length."""

    def __init__(self) -> None:
        self._commands: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._commands)

    def clear(self) -> None:
        self._commands.clear()

    # PySyncObj's names

    def put_nowait(self, command: Any) -> None:
        """Raises `queue.Full`: then PySyncObj drops the command."""
        if len(self._commands) >= COMMANDS_MAX:
            raise queue.Full
        self._commands.append(command)

    def get_nowait(self) -> Any:
        """Raises `queue.Empty`."""
        if not self._commands:
            raise queue.Empty
        return self._commands.popleft()


class TransportAdapter(Transport):  # type: ignore[misc]  # PySyncObj is untyped
    """Translates the messages that PySyncObj sends. `core.SyncObj` handles the messages that PySyncObj would
    receive.
    """

    def __init__(self, network: Network, admissions: VoterDisks) -> None:
        super().__init__(None, None, ())
        self._network, self._voter_disks = network, admissions
        self.called_in = 0
        """Term of the election that the leader asked this node to start, to transfer leadership to it."""

    def send(self, node: Any, message: dict[str, Any]) -> bool:
        match message["type"]:
            case "request_vote":
                last = LogIndex(message["last_log_index"], message["last_log_term"])
                claim, term = self._voter_disks.own_claim, message["term"]
                request = RequestVote(term, last, claim, pre=False, called=term == self.called_in)
                return self._network.send(node.id, request)
            case "apply_command":
                return self._network.send(node.id, Forward(message["command"]))
        raise AssertionError(f"PySyncObj sends {message['type']}")
