"""PySyncObj's log, outbox and clock, as its own code sees them, on ours.

The law: whatever PySyncObj's own code appends, truncates, sends or asks the time of goes through here.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from pysyncobj import syncobj
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from sequencer.raft.core.ports import Network
from sequencer.raft.core.voter_disks import VoterDisks
from sequencer.raft.model.messages import Forward, LogIndex, RaftEntry, RequestVote
from sequencer.raft.storage.log import DurableLog

PYSYNCOBJ_VERSION: Final = "0.3.17"

if VERSION != PYSYNCOBJ_VERSION:
    raise ImportError(f"sequencer.raft needs PySyncObj {PYSYNCOBJ_VERSION}, not {VERSION}")


syncobj.monotonicTime = time.monotonic  # The clock of everything else here, and quicker to ask.
COMMANDS_MAX: Final = 100_000
"""Commands that wait to be appended or forwarded: what nodes may have in flight stays far below."""


def now() -> float:
    """Seconds on PySyncObj's clock, which a simulation may have replaced; it never goes back."""
    seconds: float = syncobj.monotonicTime()
    return seconds


@contextlib.contextmanager
def clock(read: Callable[[], float]) -> Iterator[None]:
    """Put another clock in PySyncObj's place, for every node of this process: a simulated one."""
    real = syncobj.monotonicTime
    syncobj.monotonicTime = read
    try:
        yield
    finally:
        syncobj.monotonicTime = real


class Journal:
    """The durable log, which PySyncObj reads and extends as if it were its own journal."""

    def __init__(self, log: DurableLog, admissions: VoterDisks) -> None:
        self._log, self._admissions = log, admissions

    def add(self, content: bytes, index: int, term: int) -> None:
        """Append an entry; it is durable after the next sync."""
        entry = RaftEntry(content, index, term)
        self._log.append(entry)
        self._admissions.on_appended(entry)

    def truncate(self, index: int) -> None:
        """Drop the entries from `index` on."""
        self._log.truncate(index)
        self._admissions.on_truncated(index)

    def reset(self, base: LogIndex) -> None:
        """Go on behind `base`, without what was there."""
        self._log.reset(base)
        self._admissions.on_truncated(0)

    # PySyncObj's names

    def __len__(self) -> int:
        return len(self._log)

    def __getitem__(self, item: Any) -> Any:
        return self._log[item]

    def setCurrentTerm(self, term: int, voted_for: str | None) -> None:
        """Keep term and vote; durable after the next sync."""
        self._log.set_term(term, voted_for)

    def setRaftCommitIndex(self, index: int) -> None:
        """Not kept: after a restart the snapshot is what is known to be committed."""

    def onOneSecondTimer(self) -> None:
        """Nothing to do."""

    def _destroy(self) -> None:
        """The node closes the log."""


class Peer(Node):  # type: ignore[misc]  # PySyncObj is untyped
    """A member, as PySyncObj knows it. There is one object of each: it equals itself and no other."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class CommandQueue:
    """PySyncObj's queue of commands, for one thread, and so that it says whether it is empty."""

    def __init__(self) -> None:
        self._commands: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._commands)

    def clear(self) -> None:
        """Forget them."""
        self._commands.clear()

    # PySyncObj's names

    def put_nowait(self, command: Any) -> None:
        """Take one, or raise what PySyncObj expects then: the command is lost on its way."""
        if len(self._commands) >= COMMANDS_MAX:
            raise queue.Full
        self._commands.append(command)

    def get_nowait(self) -> Any:
        """Give the oldest one, or raise what PySyncObj expects if there is none."""
        if not self._commands:
            raise queue.Empty
        return self._commands.popleft()


class TransportAdapter(Transport):  # type: ignore[misc]  # PySyncObj is untyped
    """What PySyncObj's own code sends, in our messages. What it would receive, `hardened` does."""

    def __init__(self, network: Network, admissions: VoterDisks) -> None:
        super().__init__(None, None, ())
        self._network, self._admissions = network, admissions
        self.called_in = 0
        """The term that begins with an election to which the leader called this node."""

    def send(self, node: Any, message: dict[str, Any]) -> bool:
        """Queue it."""
        match message["type"]:
            case "request_vote":
                last = LogIndex(message["last_log_index"], message["last_log_term"])
                claim, term = self._admissions.own_claim, message["term"]
                request = RequestVote(term, last, claim, pre=False, called=term == self.called_in)
                return self._network.send(node.id, request)
            case "apply_command":
                return self._network.send(node.id, Forward(message["command"]))
        raise AssertionError(f"PySyncObj sends {message['type']}")
