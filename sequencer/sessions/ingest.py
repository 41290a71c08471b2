"""Ingests sessions from publishers: runs are opened by committed commands, and fenced runs accept no bytes.

Invariants:
- A byte of a run is accepted only if the run is open, everything before it in the session is merged by the
  cluster, and this node knows every fence that was committed before it started to lead or follow.
- A stream of a directory that was superseded by another ends with `rt.Fenced` as soon as this node knows,
  even if it is idle: the newer directory may have reached only other nodes, which cannot end it.
- A publisher that continues with a later run has nothing more of an earlier one, even if it did not announce
  the end of that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from replicator.protocol.handshake import NOWHERE, PushHello, PushProgress, PushStart
from replicator.protocol.messages import Chunk, LogOffset, Run, SegmentSealed, WholeRun
from rt.errors import Fenced, RtError, TooManySessions
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.merge_progress import consumed_place
from sequencer.sessions.replica import SessionReplica
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.apply_result import (
    ClusterReset,
    CommandRejected,
    Outcome,
    RangesMerged,
    RunClosed,
    RunFenced,
    RunOpened,
)
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import SEALED_RUNS_MAX, Command, OpenRun, OpenSealedRuns, SealedRun
from sequencer.state.run_lifecycle import FORGOTTEN, why_full
from sequencer.state.state import BEGIN, RUNS_MAX, ActiveRun, End, SequencerState, Session

TOGETHER_MAX: Final = 32
"""Maximum number of whole runs stored together. Many more would take so long on a slow disk that the merger
would request them from peers."""
PROPOSE_AGAIN_S: Final = 1.0
"""A command that is not applied after this time is proposed again: it may have been lost."""

logger = logging.getLogger("sequencer")


class SessionIngest:
    """The sessions of this node for the push server: a `replicator.push.server.SessionReplicaStore`."""

    def __init__(
        self,
        follower: StateFollower,
        replicas: SessionReplicas,
        members: int,
        propose: Callable[[bytes], None],
        is_up: Callable[[], bool],
    ) -> None:
        self._follower, self._replicas, self._members = follower, replicas, members
        self._propose, self._is_up = propose, is_up
        self._changed = asyncio.Event()
        self._changed_of: dict[str, asyncio.Event] = {}
        """By session name: set when something changes for which its streams wait."""
        self._asked: Counter[OpenRun | OpenSealedRuns] = Counter()
        """Commands for which streams wait. Rejections of other nodes' commands are not kept."""
        self._refusals: dict[OpenRun | OpenSealedRuns, CommandRejected] = {}
        self._streams: dict[str, set[IngestStream]] = {}

    @property
    def cluster(self) -> bytes:
        """The id of the cluster; `Unreachable` before the node has joined one."""
        return self._state().cluster

    def on_changed(self) -> None:
        """The cluster view, the link to control, or the whole state changed."""
        for waiting in (self._changed, *self._changed_of.values()):
            waiting.set()
        self._changed = asyncio.Event()
        self._changed_of.clear()

    def on_session(self, session_id: int) -> None:
        """A session changed: wake the streams of its name."""
        session = self._follower.session(session_id)
        if session is not None:
            self._on_name(session.name)

    def _on_name(self, name: str) -> None:
        if (waiting := self._changed_of.pop(name, None)) is not None:
            waiting.set()

    def on_snapshot(self) -> None:
        """The whole state was replaced."""
        for name, streams in list(self._streams.items()):
            for intake in streams:
                intake.sealed.clear()  # Any of them may have been fenced meanwhile.
            self._note_sealed(name)
            self._end_fenced(name)
        self.on_changed()

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """Handle a command that was applied here."""
        if isinstance(command, OpenRun | OpenSealedRuns):
            if isinstance(outcome, CommandRejected) and command in self._asked:
                self._refusals[command] = outcome
            elif isinstance(outcome, RunOpened):
                self._refusals.pop(command, None)
                self._end_fenced(command.session)
                self._note_sealed(command.session)
            self._on_name(command.session)
        match outcome:
            case RangesMerged(order):
                for end in order.consumed:
                    self.on_session(end.session_id)
            case RunFenced(session_id, run):
                self._drop_sealed(session_id, {run, *outcome.later})
                self.on_session(session_id)
            case RunClosed(session_id):
                self.on_session(session_id)
            case ClusterReset():
                self.on_changed()

    def _note_sealed(self, name: str) -> None:
        """Let the streams of that name remember the sealed runs, which the cluster may merge first."""
        session = self._state().session_of(name)
        for intake in self._streams.get(name, ()):
            if session is not None and session.incarnation == intake.hello.incarnation:
                intake.note_sealed(session)

    def _drop_sealed(self, session_id: int, runs: Collection[int]) -> None:
        """Runs were fenced: they may be closed before the ends with which they were sealed."""
        session = self._follower.session(session_id)
        for intake in () if session is None else self._streams.get(session.name, ()):
            if session is not None and session.incarnation == intake.hello.incarnation:
                for run in runs:
                    intake.sealed.pop(run, None)

    def _end_fenced(self, name: str) -> None:
        """End the streams of that name whose directory was superseded by another."""
        for intake in list(self._streams.get(name, ())):
            try:
                self._session_of(intake.hello)
            except Fenced as error:
                intake.end(error)

    async def accept(self, hello: PushHello, identity: Identity) -> IngestStream:
        """Prepare the session for a stream; see `SessionReplicaStore.accept`."""
        self._check_ready()
        session = self._session_of(hello)
        replica = None if session is None else await self._replicas.open_replica(session)
        if replica is not None and session is not None:
            with replica.in_use():
                await replica.store.restart()
                await self._replicas.skip_merged(replica, session)
                replica.has_stream = True
        logger.info("push_started session=%s certificate=%s", hello.session, identity.name)
        intake = IngestStream(self, hello, session, replica)
        self._streams.setdefault(hello.session, set()).add(intake)
        self._note_sealed(hello.session)
        self._end_fenced(hello.session)  # It may have been superseded while the replica was opened.
        return intake

    def leave(self, intake: IngestStream) -> None:
        """Remove a stream that ended."""
        streams = self._streams.get(intake.hello.session, set())
        streams.discard(intake)
        if not streams:
            self._streams.pop(intake.hello.session, None)

    def start(self, session: Session | None, replica: SessionReplica | None) -> PushStart:
        """Where the publisher must continue to send."""
        standing, state = self._follower.standing, self._state()
        place = replica.receiver.next_offset if replica is not None else None
        if place is None and session is not None:
            place = consumed_place(session)
        if session is not None and session.fenced_end and (place is None or place.run < session.fenced_end):
            place = LogOffset(session.fenced_end, 0, 0)
        if session is not None and session.id in state.closed:
            # It was closed without its publisher: no more bytes of its opened runs are accepted.
            place = max(place or NOWHERE, LogOffset(session.last_run + 1, 0, 0))
        elif session is not None and place is not None:
            place = self._next_run(session, place)
        return PushStart(state.cluster, self._follower.epoch, self._members, standing.node, place)

    def _next_run(self, session: Session, place: LogOffset) -> LogOffset:
        """The start of the next run, if no bytes of the last merged one are needed from the publisher.

        That one may have been closed without its publisher, whose disk has more of it than is accepted.
        """
        opened, done = session.active, session.done
        if opened is None or done is None or place.run > done[0]:
            return place
        run, end = done
        is_needed = place < _place(run, end) and not self._replicas.is_released(session.id)
        return place if is_needed else LogOffset(opened.run, 0, 0)

    async def open_session(
        self, intake: IngestStream, opened: Run, sealed: Sequence[SealedRun] = ()
    ) -> Session:
        """Open a run, and wait until its bytes are accepted; `rt.Fenced`.

        `sealed`: it is the first of these runs, which are opened together.
        """
        hello = intake.hello
        newest = self._state().session_of(hello.session)
        # If another directory supersedes this one before this is applied, it is rejected. A publisher that is
        # still connected tries again, so a late command does not end the newer directory.
        newest_id = newest.id if newest is not None else 0
        whose = hello.session, hello.incarnation, hello.dedup_id
        command: OpenRun | OpenSealedRuns = OpenRun(*whose, opened.number, opened.run_id, newest_id)
        if sealed:
            command = OpenSealedRuns(*whose, tuple(sealed), newest_id)
        self._asked[command] += 1
        try:
            return await self._opened(intake, opened, command)
        finally:
            self._asked[command] -= 1
            if not self._asked[command]:
                del self._asked[command]
                self._refusals.pop(command, None)

    async def _opened(self, intake: IngestStream, opened: Run, command: OpenRun | OpenSealedRuns) -> Session:
        hello = intake.hello
        self._refusals.pop(command, None)
        proposed_at = float("-inf")
        loop = asyncio.get_running_loop()
        while True:
            self._check_ready()
            session = self._session_of(hello)
            if session is not None and opened.number < session.fenced_end:
                ended = CommandRejected(f"a reset of the cluster ended run {opened.number}", True)
                raise _refusal(ended, hello, opened)
            if session is not None and self._is_welcome(intake, session, opened):
                return session
            if session is not None:
                await self._announce_skipped_run(session, opened)
            refused = self._refusals.pop(command, None)
            if refused is not None:
                raise _refusal(refused, hello, opened)
            known = session.run_of(opened.number) if session is not None else None
            why = why_full(self._state(), hello.session, hello.dedup_id) if known is None else None
            if why is not None:
                raise _refusal(CommandRejected(why, is_full=True), hello, opened)
            has_room = session is None or len(session.active_runs) < RUNS_MAX - SEALED_RUNS_MAX
            has_room = has_room or isinstance(command, OpenRun)
            if known is None and has_room and loop.time() - proposed_at >= PROPOSE_AGAIN_S:
                proposed_at = loop.time()
                self._propose(encode_command(command))
            elif known is not None and known.run_id != opened.run_id:
                raise _refusal(
                    CommandRejected(f"run {opened.number} is open with another run id", True), hello, opened
                )
            await self._wait_for(hello.session)

    async def _announce_skipped_run(self, session: Session, later: Run) -> None:
        """Announce the end of the active run if the publisher continues with a later run instead.

        A publisher deletes a run when all of it is merged. To a node that is missing the last segment of that
        run it sends only what follows, and this may be the only node that it reaches.
        """
        active = session.active
        if active is None or active.run >= later.number or active.is_fenced or active.end is not None:
            return
        end = session.consumed.end if session.consumed is not None else End(*BEGIN, 0)
        self._replicas.announce(await self._replicas.open_replica(session), active.run, end)

    def limit(self, session_id: int, run: int, sealed: End | None = None) -> End | None:
        """The end beyond which a run's bytes are rejected; None if there is none. Raises why it is closed.

        `sealed`: where it ends, if it was opened with its end. The cluster may be done with it.
        """
        session = self._state().sessions.get(session_id)
        if session is None:
            raise Unreachable("that session was closed", got=f"session {session_id}", hint="Reconnect.")
        opened = session.run_of(run)
        if opened is not None and opened.end is None:
            if opened.is_fenced:
                raise Unreachable("that run is being closed", where=session.name, hint="Try again.")
            return None
        if opened is not None:
            return opened.end
        if session.done is not None and session.done[0] == run:
            return session.done[1]
        if sealed is not None and run >= session.fenced_end:
            return sealed
        raise Unreachable("that run is over", where=session.name, got=f"run {run}", hint="Reconnect.")

    async def _wait_for(self, name: str) -> None:
        """Wait until the session changes, or until a proposal must be repeated."""
        await self._until(self._changed_of.setdefault(name, asyncio.Event()), PROPOSE_AGAIN_S)

    async def wait(self, timeout_s: float) -> None:
        """Wait until the cluster view or the link changes, at most `timeout_s`."""
        await self._until(self._changed, timeout_s)

    async def _until(self, changed: asyncio.Event, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            pass

    async def replica_of(self, session: Session) -> SessionReplica:
        """The open replica of a session."""
        return await self._replicas.open_replica(session)

    async def skip_to_run(self, replica: SessionReplica, session: Session, run: int) -> None:
        """Continue at the start of `run`: everything before it is merged, though this replica has not all."""
        await self._replicas.skip_to(replica, session, LogOffset(run, 0, 0), None)

    async def append(self, replica: SessionReplica, item: Chunk | SegmentSealed) -> None:
        """Store an accepted item."""
        await self._replicas.append(replica, item)

    async def append_whole(self, replica: SessionReplica, runs: Sequence[WholeRun]) -> bool:
        """Store accepted whole runs; False, with nothing done, if they are not the next ones."""
        return await replica.store.append_whole(runs)

    def sealed_in(self, session_id: int, runs: Sequence[WholeRun], known: Mapping[int, ActiveRun]) -> int:
        """How many of these runs, counted from the first, are sealed now with exactly their end.

        `known`: those that were sealed, of which the cluster may be done.
        """
        session = self._state().sessions.get(session_id)
        if session is None:
            return 0
        active_runs = {**known, **{opened.run: opened for opened in session.active_runs}}
        for count, run in enumerate(runs):
            sealed = ActiveRun(run.run.number, run.run.run_id, end=End(0, len(run.data), run.end))
            if run.run.number < session.fenced_end or active_runs.get(run.run.number) != sealed:
                return count
        return len(runs)

    async def up(self) -> None:
        """Wait until control is connected. Without it durable bytes are not reported or acknowledged."""
        while not self._is_up():
            await self.wait(PROPOSE_AGAIN_S)

    def _state(self) -> SequencerState:
        state = self._follower.state
        if state is None or not any(state.cluster):
            raise Unreachable("this node has not joined its cluster yet", hint="Try again, or another node.")
        return state

    def _check_ready(self) -> None:
        if not self._is_up() or not self._follower.standing.is_caught_up:
            raise Unreachable("this node does not follow a leader now", hint="Try again, or another node.")

    def _session_of(self, hello: PushHello) -> Session | None:
        state = self._state()
        session = state.session_of(hello.session)
        if session is None or session.incarnation != hello.incarnation:
            self._check_incarnation(state, hello)
            return None
        return session

    def _check_incarnation(self, state: SequencerState, hello: PushHello) -> None:
        got = f"incarnation {hello.incarnation.hex()}"
        if (hello.session, hello.incarnation) in state.by_incarnation:
            raise Fenced(
                "a newer directory of this session was opened",
                where=hello.session,
                got=got,
                hint="Two hosts use one session name, or an old directory was restored. Use different names.",
            )
        if (hello.session, hello.incarnation) in state.forgotten:
            raise Fenced(
                FORGOTTEN,
                where=hello.session,
                got=got,
                hint="Start with a new directory. This one is rejected because it may be merged already.",
            )

    def _is_welcome(self, intake: IngestStream, session: Session, opened: Run) -> bool:
        """Whether bytes of the run are accepted: everything before it is merged, or complete here."""
        if session.done is not None and opened.number <= session.done[0]:
            known = intake.sealed.get(opened.number)
            # Accept the bytes that this node is still missing.
            return session.done[0] == opened.number or (known is not None and known.run_id == opened.run_id)
        replica = intake.replica
        for before, one in zip((None, *session.active_runs), session.active_runs, strict=False):
            if (one.run, one.run_id) == (opened.number, opened.run_id):
                return before is None or (replica is not None and _may_begin(replica, opened.number, before))
            if one.end is None:
                return False
        return False


class IngestStream:
    """One publisher's stream (`replicator.push.server.SessionIntake`)."""

    def __init__(
        self, ingest: SessionIngest, hello: PushHello, session: Session | None, replica: SessionReplica | None
    ) -> None:
        self._ingest, self.hello = ingest, hello
        self._replica = replica
        self.sealed: dict[int, ActiveRun] = {}
        """By run number: sealed runs that were open during this stream, from the current one on. Never a run
        that was fenced: nothing after the end at which it is closed may be acknowledged."""
        self._ended: RtError | None = None
        self._has_replica = asyncio.Event()
        if replica is not None:
            self._has_replica.set()
        self._start = ingest.start(session, replica)

    @property
    def start(self) -> PushStart:
        """See the protocol."""
        return self._start

    @property
    def replica(self) -> SessionReplica | None:
        """The replica that this stream feeds; None before its session is open."""
        return self._replica

    def note_sealed(self, session: Session) -> None:
        """Remember the sealed runs: the cluster may merge them before they arrive here."""
        place = self._replica.receiver.next_offset if self._replica is not None else None
        if place is not None:
            self.sealed = {x: opened for x, opened in self.sealed.items() if x >= place.run}
        for opened in session.active_runs:
            if opened.end is not None and not opened.is_fenced:
                self.sealed[opened.run] = opened

    async def open_run(self, opened: Run) -> None:
        """See the protocol."""
        session = await self._ingest.open_session(self, opened)
        await self._begin(session, opened)

    async def _begin(self, session: Session, opened: Run) -> SessionReplica:
        """Prepare the session's replica for bytes of that run."""
        replica = self._replica = await self._ingest.replica_of(session)
        replica.has_stream = True
        receiver = replica.receiver
        place = receiver.next_offset
        is_over = session.done is not None and place is not None and place.run < opened.number
        is_anew = place is None and 0 < session.fenced_end <= opened.number
        if (is_over and not receiver.has_ended) or is_anew:
            # The cluster merged a run that is incomplete here: continue without the rest.
            await self._ingest.skip_to_run(replica, session, opened.number)
        await replica.store.start_run(opened)
        self._has_replica.set()
        return replica

    async def append_runs(self, runs: Sequence[WholeRun]) -> None:
        """See the protocol."""
        while runs:
            sealed = [
                SealedRun(one.run.number, one.run.run_id, End(0, len(one.data), one.end)) for one in runs
            ]
            session = await self._ingest.open_session(self, runs[0].run, sealed)
            replica = await self._begin(session, runs[0].run)
            # They are stored without a pause after this check, or after what is being stored now. So a fence
            # that is applied meanwhile finds them.
            count = min(self._ingest.sealed_in(session.id, runs, self.sealed), TOGETHER_MAX)
            if not count or not await self._ingest.append_whole(replica, runs[:count]):
                # It was opened without its end, or the cluster merged it, or it is not the next one.
                count = 1
                _, chunk, seal = runs[0].items
                await self.append(chunk)
                await self.append(seal)
            runs = runs[count:]

    async def append(self, item: Chunk | SegmentSealed) -> None:
        """See the protocol."""
        replica = self._replica
        if replica is None:
            if isinstance(item, SegmentSealed):
                return  # Its run was merged before this node had a replica.
            raise Fenced("bytes of a run that was not announced", where=self.hello.session)
        if isinstance(item, SegmentSealed):
            place = replica.receiver.next_offset
            if place is None or item.end_offset.segment < place.segment:
                return
        run = item.start.run if isinstance(item, Chunk) else item.end_offset.run
        known = self.sealed.get(run)
        limit = self._ingest.limit(replica.session_id, run, None if known is None else known.end)
        if limit is not None and isinstance(item, Chunk):
            await self._append_before(replica, item, _place(run, limit))
            return
        await self._ingest.append(replica, item)

    async def _append_before(self, replica: SessionReplica, item: Chunk, end: LogOffset) -> None:
        """Accept the bytes before the end of a closed run. A publisher with more must reconnect."""
        if item.start < end:
            whole = item if item.end <= end else Chunk(item.start, _cut(item, end))
            await self._ingest.append(replica, whole)
        if item.end > end:
            raise Unreachable(
                "bytes after the end of a run that was closed",
                where=self.hello.session,
                got=item.end,
                expected=f"at most {end}",
                hint="Reconnect: the node replies where the session continues.",
            )

    async def next_progress(self, told: PushProgress | None) -> PushProgress:
        """See the protocol."""
        await self._has_replica.wait()
        assert self._replica is not None
        progress = await self._replica.store.next_progress(told, lambda: self._ended is not None)
        if self._ended is not None:
            raise self._ended
        await self._ingest.up()
        return progress

    def end(self, error: RtError) -> None:
        """End the stream, which may be idle, with this error."""
        if self._ended is None:
            self._ended = error
            if self._replica is not None:
                self._replica.store.recheck()

    async def close(self) -> None:
        """See the protocol."""
        self._ingest.leave(self)
        if self._replica is not None:
            self._replica.has_stream = False
            with self._replica.in_use(), contextlib.suppress(RtError):
                # The stream has already reported errors of the replica.
                await self._replica.store.restart()


def _may_begin(replica: SessionReplica, x: int, before: ActiveRun) -> bool:
    """Whether a replica holds some of the run, or ends where the closed run before it ends."""
    place, end = replica.receiver.next_offset, before.end
    if place is not None and place.run == x:
        return True
    return end is not None and replica.receiver.has_ended and place == (before.run, end.roll, end.offset)


def _cut(item: Chunk, end: LogOffset) -> memoryview:
    return memoryview(item.data)[: end.offset - item.start.offset]


def _place(x: int, end: End) -> LogOffset:
    return LogOffset(x, end.roll, max(end.offset, SEGMENT_HEADER_BYTES))


def _refusal(refused: CommandRejected, hello: PushHello, opened: Run) -> RtError:
    if refused.is_full:
        return TooManySessions(
            "too many sessions are open",
            where=hello.session,
            got=refused.why,
            hint="An operator closes sessions by POST /close-session, or raises the limit by POST "
            "/configuration. The number of dedup ids is fixed: use known ones.",
        )
    kind = Fenced if refused.is_fenced else Unreachable
    return kind(
        f"the cluster rejected that run: {refused.why}", where=f"{hello.session}, run {opened.number}"
    )
