"""Requests to the owners of leases in a simulation, the owners' commits, and the laws for both.

Any node gets a request, by a clock that differs. The request comes again later, also much later, on another
node or as the same command. An owner reads the requests on any node, carries some of them out, and answers
them in a commit. It repeats the commit until it hears of the result. Sometimes it forgets everything but its
lease. The laws, in each history: a request is carried out at most once. When a node has reported that a
request waits, the table has the request or its answer until the request's time is over.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from sequencer.state.apply_result import Outcome, PostAnswer, RequestPosted, TableAnswer, TableWritten
from sequencer.state.command_codec import encode_command
from sequencer.state.leases import requests
from sequencer.state.leases.requests import Posted, PostRequest
from sequencer.state.leases.table_rows import LeaseTable, TableRow
from sequencer.state.leases.tables import TablePartId, WriteTable
from simulation.history import require
from simulation.lease_holders import NAMES, Holder

if TYPE_CHECKING:
    from sequencer.state.commands import Command
    from simulation.cluster import Cluster
    from simulation.run import NodeRun

ASK_EVERY_S: Final = 0.1
WORK_EVERY_S: Final = 0.02
SKEW_S: Final = 0.1
"""How far a clock is off: at most a tenth of the time for which requests are kept."""
_BEGUN_S: Final = 1000.0
_DONE, _LATE = b"done", b"late"


@dataclass(eq=False, slots=True)
class Desk:
    """An owner's work with one lease. `commits` is None until it has read the table."""

    token: int
    commits: int | None = None
    is_open: bool = False
    """Whether it has made a commit, which owners do before they read requests."""
    pending: WriteTable | None = None


@dataclass(eq=False, slots=True)
class Line:
    """What happened in one history."""

    index: int = 0
    """The index up to which the history was checked."""
    written: set[bytes] = field(default_factory=set)
    """Attempts that were committed."""
    carried: Counter[bytes] = field(default_factory=Counter)
    waiting: dict[bytes, tuple[str, float]] = field(default_factory=dict)
    """Requests that a node reported as waiting: their lease, and until when they wait."""


class OwnerRequests:
    """All requests of a simulation. There are none if the settings say so."""

    def __init__(self, cluster: Cluster) -> None:
        self.is_over = False
        self.seen: Counter[str] = Counter()
        self._cluster = cluster
        self._rng = random.Random(repr(cluster.rng.getstate()[1][8:16]))  # Its own random numbers.
        self._attempts = itertools.count(1)
        self._desks: dict[tuple[str, str], Desk] = {}
        self._lines: defaultdict[int, Line] = defaultdict(Line)
        self._until: dict[bytes, float] = {}

    def begin(self) -> None:
        for _ in range(self._cluster.settings.askers):
            self._again(ASK_EVERY_S, self._ask)
            self._again(WORK_EVERY_S, self._work)

    def _again(self, every_s: float, act: object) -> None:
        def acted() -> None:
            if not self.is_over:
                act()  # type: ignore[operator]
                self._again(every_s, act)

        self._cluster.timeline.after(self._rng.expovariate(1 / every_s), acted)

    def _now_ns(self) -> int:
        """Return the time by one of the clocks."""
        skew_s = self._rng.choice((0.0, 0.0, -SKEW_S, SKEW_S))
        return int((_BEGUN_S + self._cluster.timeline.now + skew_s) * 1e9)

    # Asking

    def _ask(self) -> None:
        rng, now = self._rng, self._cluster.timeline.now
        request, lease = rng.randbytes(16), rng.choice(NAMES)
        self._until[request] = until_s = now + rng.choice((0.3, 1.0, 3.0))
        sent: list[bytes] = []

        until_ns = self._now_ns() + int((until_s - now) * 1e9)

        def arrive(left_s: float) -> None:
            """Post the request as a message that was sent with `left_s` seconds left and then delayed."""
            at_ns, left_s = self._now_ns(), max(left_s, until_s - self._cluster.timeline.now)
            end_ns = min(at_ns + int(left_s * 1e9), until_ns + self._late_ns())
            if end_ns > at_ns:
                sent.append(encode_command(PostRequest(lease, request, at_ns, end_ns, b"x")))
                self._propose(sent[-1])

        def repeat() -> None:
            """Repeat a command, as a node does that does not hear of its result."""
            if sent:
                self._propose(rng.choice(sent))

        self._cluster.timeline.after(0.02 * rng.random(), lambda: arrive(until_s - now))
        for _ in range(rng.choice((0, 0, 1, 3))):
            delay_s, left_s = rng.choice((0.1, 1.0, 6.0)) * rng.random(), (until_s - now) * rng.random()
            again = repeat if rng.random() < 0.5 else partial(arrive, left_s)
            self._cluster.timeline.after(delay_s, again)

    def _late_ns(self) -> int:
        """See `requests.LATE_NS`."""
        return requests.KEPT_NS // 4

    def _propose(self, content: bytes) -> None:
        runs = self._cluster.runs()
        if runs and not self.is_over:
            self._rng.choice(runs).propose(0, content)

    # Work of the owners

    def _work(self) -> None:
        holders, runs = self._cluster.holders.all, self._cluster.runs()
        if not holders or not runs:
            return
        holder, lease, run = self._rng.choice(holders), self._rng.choice(NAMES), self._rng.choice(runs)
        belief = holder.counts_on(lease)
        if belief is None:
            self._desks.pop((holder.name, lease), None)
            return
        desk = self._desks.get((holder.name, lease))
        if desk is None or desk.token != belief.token or self._rng.random() < 0.02:
            desk = self._desks[holder.name, lease] = Desk(belief.token)
        if desk.pending is None:
            self._prepare(desk, holder, lease, run)
        if desk.pending is not None:
            content = encode_command(desk.pending)
            self._propose(content)
            if self._rng.random() < 0.1:  # Late, when the lease may have another owner.
                delay_s = self._rng.choice((1.0, 3.0)) * self._rng.random()
                self._cluster.timeline.after(delay_s, lambda: self._propose(content))

    def _prepare(self, desk: Desk, holder: Holder, lease: str, run: NodeRun) -> None:
        state = run.machine.leases
        held, table = state.leases.get(lease), state.tables.get(lease)
        if held is None or (held.owner, held.token) != (holder.name, desk.token):
            return
        commits = 0 if table is None else table.commits
        if desk.commits is None:
            desk.commits = commits
        if self._misses(commits, desk.commits):
            return
        now_ns, puts, deletes = self._now_ns(), [TableRow("low", self._rng.randbytes(4))], list[str]()
        for one in self._chosen(table) if desk.is_open else ():
            done = _DONE if one.until_ns > now_ns else _LATE
            value = bytes(8) + one.until_ns.to_bytes(8, "big") + done
            puts.append(TableRow(f"answers\0{one.id.hex()}", value))
            deletes.append(f"requests\0{one.id.hex()}")
        attempt = next(self._attempts).to_bytes(8, "big") + self._rng.randbytes(8)
        by = TablePartId(lease, holder.name, desk.token, desk.commits + 1, attempt, 0, is_last=True)
        desk.pending = WriteTable(by, (), tuple(deletes), tuple(puts))

    def _misses(self, commits: int, known: int) -> bool:
        """Whether a node misses a commit that its owner knows. Then it shows no requests."""
        return commits < known

    def _chosen(self, table: LeaseTable | None) -> list[Posted]:
        return [] if table is None else requests.waiting(table)[: self._rng.randrange(1, 4)]

    # Answers

    def on_applied(self, run: NodeRun, command: Command, outcome: Outcome) -> None:
        """A node applied a command about leases."""
        line = self._lines[run.machine.line]
        if run.machine.index > line.index:
            line.index = run.machine.index
            self._note(line, command, outcome)
            self._require_known(line, run)
        if isinstance(command, WriteTable) and isinstance(outcome, TableWritten) and self._rng.random() < 0.5:
            delay_s = self._rng.choice((0.001, 0.02, 0.3)) * self._rng.random()
            self._cluster.timeline.after(delay_s, lambda: self._hear(command, outcome))

    def _note(self, line: Line, command: Command, outcome: Outcome) -> None:
        if isinstance(command, PostRequest) and isinstance(outcome, RequestPosted):
            self.seen[f"post {outcome.answer.value}"] += 1
            if outcome.answer is PostAnswer.WAITING:
                line.waiting.setdefault(command.id, (command.lease, self._until[command.id]))
        if not isinstance(command, WriteTable) or not isinstance(outcome, TableWritten):
            return
        self.seen[f"commit {outcome.answer.value}"] += 1
        if outcome.answer is not TableAnswer.WRITTEN or command.by.request in line.written:
            return
        line.written.add(command.by.request)
        for row in command.puts:
            kind, _, request = row.key.partition("\0")
            if kind == "answers":
                is_done = row.value.endswith(_DONE)
                self.seen["carried out" if is_done else "late"] += 1
                line.carried[bytes.fromhex(request)] += is_done
                require(line.carried[bytes.fromhex(request)] <= 1, "a request carried out twice", request)

    def _require_known(self, line: Line, run: NodeRun) -> None:
        """Check that the table has each waiting request or its answer until the request's time is over."""
        tables, now = run.machine.leases.tables, self._cluster.timeline.now
        for request, (lease, until_s) in list(line.waiting.items()):
            if now > until_s:
                del line.waiting[request]
                continue
            table = tables.get(lease)
            is_known = table is not None and requests.look_up(table, request)[0] is not PostAnswer.UNKNOWN
            require(is_known, "a request that waited is lost", request.hex(), lease)

    def _hear(self, command: WriteTable, outcome: TableWritten) -> None:
        desk = self._desks.get((command.by.owner, command.by.lease))
        if desk is None or desk.pending != command:
            return
        desk.pending = None
        if outcome.answer is TableAnswer.WRITTEN:
            desk.commits, desk.is_open = command.by.commit, True
        elif outcome.answer is not TableAnswer.NO_ROOM:
            desk.commits, desk.is_open = None, False
