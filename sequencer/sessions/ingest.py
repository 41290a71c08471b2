"""Ingests sessions from publishers: runs are opened by committed commands, and fenced runs accept no bytes.

Invariants:
- A byte is accepted only if `sequencer.sessions.run_admission` accepts its run, and this node knows every
  fence that was committed before it started to lead or follow.
- A stream of a directory that was superseded by another ends with `rt.Fenced` as soon as this node knows,
  even if it is idle: the newer directory may have reached only other nodes, which cannot end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final

from replicator.protocol.handshake import PushHello, PushProgress, PushStart, PushStatus, SilenceLimit
from replicator.protocol.messages import Chunk, LogOffset, Run, SegmentSealed, WholeRun
from replicator.protocol.run_in_thread import to_end
from replicator.receive.session_receiver import SessionReceiver
from rt.errors import Fenced, RtError
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.replica import SessionReplica
from sequencer.sessions.replicas import SessionReplicas
from sequencer.sessions.run_admission import (
    beyond_end,
    end_offset,
    is_welcome,
    may_be_another,
    rejection,
    run_end,
    sealed_count,
    session_of,
    skipped_run,
    start_offset,
    without_merged,
)
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
from sequencer.state.commands import Command
from sequencer.state.run_lifecycle import why_full
from sequencer.state.session_commands import SEALED_RUNS_MAX, OpenRun, OpenSealedRuns, SealedRun
from sequencer.state.state import RUNS_MAX, ActiveRun, End, SequencerState, Session

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
        self._follower, self.replicas, self._members = follower, replicas, members
        self._propose, self._is_up = propose, is_up
        self._changed = asyncio.Event()
        self._changed_of: dict[str, asyncio.Event] = {}
        """By session name: set when something changes that the streams of the session wait for."""
        self._asked: Counter[OpenRun | OpenSealedRuns] = Counter()
        """Commands for which streams wait. Rejections of other nodes' commands are not kept."""
        self._refusals: dict[OpenRun | OpenSealedRuns, CommandRejected] = {}
        self._streams: dict[str, set[IngestStream]] = {}

    @property
    def cluster(self) -> bytes:
        return self.state.cluster

    def on_view(self, view: pb.Standing) -> None:
        """The cluster view changed."""
        self._members = sum(not one.is_learner for one in view.nodes) or self._members
        self.on_changed()

    def on_changed(self) -> None:
        """The cluster view, the link to control, or the whole state changed."""
        for waiting in (self._changed, *self._changed_of.values()):
            waiting.set()
        self._changed = asyncio.Event()
        self._changed_of.clear()

    def on_session(self, session_id: int) -> None:
        if (session := self._follower.session(session_id)) is not None:
            self._on_name(session.name)

    def _on_name(self, name: str) -> None:
        if (waiting := self._changed_of.pop(name, None)) is not None:
            waiting.set()

    def on_snapshot(self) -> None:
        for name, streams in list(self._streams.items()):
            for intake in streams:
                intake.sealed.clear()  # Any of them may have been fenced meanwhile.
            self._note_sealed(name)
            self._end_fenced(name)
        self.on_changed()

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        if isinstance(command, OpenRun | OpenSealedRuns):
            if isinstance(outcome, CommandRejected) and command in self._asked:
                self._refusals[command] = outcome
            elif isinstance(outcome, RunOpened):
                self._refusals.pop(command, None)
                self._end_fenced(command.session)
                self._note_sealed(command.session)
            self._on_name(command.session)
        match outcome:
            case RangesMerged(plan):
                for end in plan.consumed:
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
        if (session := self.state.session_of(name)) is not None:
            for intake in self._streams_of(session):
                intake.note_sealed(session)

    def _drop_sealed(self, session_id: int, runs: Collection[int]) -> None:
        """Runs were fenced: they may be closed before the ends with which they were sealed."""
        for intake in self._streams_of(self._follower.session(session_id)):
            for run in runs:
                intake.sealed.pop(run, None)

    def _streams_of(self, session: Session | None) -> list[IngestStream]:
        """The streams of that directory, without those of an older or newer one of the same name."""
        if session is None:
            return []
        streams = self._streams.get(session.name, ())
        return [intake for intake in streams if intake.hello.incarnation == session.incarnation]

    def _end_fenced(self, name: str) -> None:
        """End the streams of that name whose directory was superseded by another."""
        for intake in list(self._streams.get(name, ())):
            try:
                session_of(self.state, intake.hello)
            except Fenced as error:
                intake.end(error)

    async def accept(self, hello: PushHello, identity: Identity) -> IngestStream:
        """Prepare the session for a stream; see `SessionReplicaStore.accept`."""
        self._check_ready()
        session = session_of(self.state, hello)
        replica = None if session is None else await self.replicas.open_replica(session)
        if replica is not None and session is not None:
            with replica.in_use():
                await replica.store.restart()
                await self.replicas.skip_merged(replica, session)
                replica.has_stream = True
        logger.info("push_started session=%s certificate=%s", hello.session, identity.name)
        intake = IngestStream(self, hello, session, replica)
        self._streams.setdefault(hello.session, set()).add(intake)
        self._note_sealed(hello.session)
        self._end_fenced(hello.session)  # It may have been superseded while the replica was opened.
        return intake

    def leave(self, intake: IngestStream) -> None:
        streams = self._streams.get(intake.hello.session, set())
        streams.discard(intake)
        if not streams:
            self._streams.pop(intake.hello.session, None)

    def start(self, session: Session | None, replica: SessionReplica | None) -> PushStart:
        """Where the publisher must continue to send."""
        state, stored = self.state, replica.receiver.next_offset if replica is not None else None
        is_released = session is not None and self.replicas.is_released(session.id)
        place = start_offset(state, session, stored, is_released=is_released)
        node, epoch = self._follower.standing.node, self._follower.epoch
        limit = SilenceLimit(session.last_run, session.silence_ms_max) if session else SilenceLimit(0, 0)
        return PushStart(state.cluster, epoch, self._members, node, place, True, limit)

    async def open_session(
        self, intake: IngestStream, opened: Run, sealed: Sequence[SealedRun] = ()
    ) -> Session:
        """Open a run, and wait until its bytes are accepted; `rt.Fenced`.

        `sealed`: the runs that are opened together with it; `opened` is the first of them.
        """
        hello = intake.hello
        newest = self.state.session_of(hello.session)
        # The command is rejected if another directory supersedes this one before it is applied. So a late
        # command does not end the newer directory. A publisher that is still connected tries again.
        newest_id, whose = newest.id if newest else 0, (hello.session, hello.incarnation, hello.dedup_id)
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
            session = session_of(self.state, hello)
            if session is not None:
                if opened.number < session.fenced_end:
                    ended = CommandRejected(f"a reset of the cluster ended run {opened.number}", True)
                    raise rejection(ended, hello, opened)
                if is_welcome(session, opened, intake.receiver, intake.sealed):
                    return session
                if (skipped := skipped_run(session, opened)) is not None:
                    self.replicas.announce(await self.replicas.open_replica(session), *skipped)
            if (refused := self._refusals.pop(command, None)) is not None:
                raise rejection(refused, hello, opened)
            known = session.run_of(opened.number) if session is not None else None
            why = why_full(self.state, hello.session, hello.dedup_id) if known is None else None
            if why is not None:
                raise rejection(CommandRejected(why, is_full=True), hello, opened)
            runs = 0 if session is None or isinstance(command, OpenRun) else len(session.active_runs)
            has_room = runs < RUNS_MAX - SEALED_RUNS_MAX
            if known is None and has_room and loop.time() - proposed_at >= PROPOSE_AGAIN_S:
                proposed_at = loop.time()
                self._propose(encode_command(command))
            elif known is not None and known.run_id != opened.run_id:
                other = CommandRejected(f"run {opened.number} is open with another run id", True)
                raise rejection(other, hello, opened)
            await _changed_or_due(self._changed_of.setdefault(hello.session, asyncio.Event()))

    async def up(self) -> None:
        """Wait until control is connected. Without it durable bytes are not reported or acknowledged."""
        while not self._is_up():
            await _changed_or_due(self._changed)

    @property
    def state(self) -> SequencerState:
        """The committed state; `Unreachable` before the node has joined a cluster."""
        return self._follower.joined_state

    def _check_ready(self) -> None:
        if not self._is_up() or not self._follower.standing.is_caught_up:
            raise Unreachable("this node does not follow a leader now", hint="Try again, or another node.")


class IngestStream:
    """One publisher's stream (`replicator.push.server.SessionIntake`)."""

    def __init__(
        self, ingest: SessionIngest, hello: PushHello, session: Session | None, replica: SessionReplica | None
    ) -> None:
        self._ingest, self.hello, self._replica = ingest, hello, replica
        self.sealed: dict[int, ActiveRun] = {}
        """By run number: sealed runs that were open during this stream, from the current one on. Never a run
        that was fenced: nothing after the end at which it is closed may be acknowledged."""
        self._ended: RtError | None = None
        self._hides_merged = False  # Merged bytes may be of another run with the current run's number.
        self._progress = PushProgress()  # The last progress, before its merged part is hidden.
        self._has_begun = asyncio.Event()
        """Set at the end, or when a run was accepted. Before, progress may be of one with the same number."""
        self.start = ingest.start(session, replica)

    @property
    def receiver(self) -> SessionReceiver | None:
        """The receiver that this stream feeds; None before its session is open."""
        return None if self._replica is None else self._replica.receiver

    def note_sealed(self, session: Session) -> None:
        """Remember the sealed runs: the cluster may merge them before they arrive here."""
        place = self._replica.receiver.next_offset if self._replica is not None else None
        if place is not None:
            self.sealed = {x: opened for x, opened in self.sealed.items() if x >= place.run}
        self.sealed |= {one.run: one for one in session.active_runs if one.end and not one.is_fenced}

    async def open_run(self, opened: Run) -> None:
        await self._begin(await self._ingest.open_session(self, opened), opened)

    async def _begin(self, session: Session, opened: Run) -> SessionReplica:
        """Prepare the session's replica for bytes of that run."""
        replica = self._replica = await self._ingest.replicas.open_replica(session)
        replica.has_stream = True
        self._hides_merged = may_be_another(session, opened, self.sealed)
        place = replica.receiver.next_offset
        is_over = session.done is not None and place is not None and place.run < opened.number
        is_anew = place is None and 0 < session.fenced_end <= opened.number
        if (is_over and not replica.receiver.has_ended) or is_anew:
            # The cluster merged a run that is incomplete here: continue without the rest.
            await self._ingest.replicas.skip_to(replica, session, LogOffset(opened.number, 0, 0), None)
        await replica.store.start_run(opened)
        self._has_begun.set()
        replica.store.wake()
        return replica

    async def append_runs(self, runs: Sequence[WholeRun]) -> None:
        while runs:
            sealed = [
                SealedRun(one.run.number, one.run.run_id, End(0, len(one.data), one.end)) for one in runs
            ]
            session = await self._ingest.open_session(self, runs[0].run, sealed)
            replica = await self._begin(session, runs[0].run)
            # The runs are stored without a pause, directly after this check or directly after the bytes that
            # are being stored now. So a fence that is applied meanwhile finds them.
            count = min(sealed_count(self._ingest.state, session.id, runs, self.sealed), TOGETHER_MAX)
            if not count or not await replica.store.append_whole(runs[:count]):
                # The run was opened without its end, or the cluster merged it, or it is not the next run.
                count = 1
                _, chunk, seal = runs[0].items
                await self.append(chunk)
                await self.append(seal)
            runs = runs[count:]

    async def append(self, item: Chunk | SegmentSealed) -> None:
        if (replica := self._replica) is None:
            if isinstance(item, SegmentSealed):
                return  # Its run was merged before this node had a replica.
            raise Fenced("bytes of a run that was not announced", where=self.hello.session)
        if isinstance(item, SegmentSealed):
            place = replica.receiver.next_offset
            if place is None or item.end_offset.segment < place.segment:
                return
        run = item.start.run if isinstance(item, Chunk) else item.end_offset.run
        limit = run_end(self._ingest.state, replica.session_id, run, self.sealed.get(run))
        if limit is not None and isinstance(item, Chunk):
            await self._append_before(replica, item, end_offset(run, limit))
        else:
            await self._ingest.replicas.append(replica, item)

    async def _append_before(self, replica: SessionReplica, item: Chunk, end: LogOffset) -> None:
        """Accept the bytes before the end of a closed run. A publisher with more must reconnect."""
        if item.start < end:
            accepted = memoryview(item.data)[: end.offset - item.start.offset]
            await self._ingest.replicas.append(replica, Chunk(item.start, accepted))
        if item.end > end:
            raise beyond_end(item.end, end, self.hello.session)

    def record_status(self, status: PushStatus) -> None:
        """Alarms need it: see `client_tracker`."""

    async def next_progress(self, told: PushProgress | None) -> PushProgress:
        await self._has_begun.wait()
        if self._ended is None:
            assert self._replica is not None
            hides, store = self._hides_merged, self._replica.store
            self._progress = await store.next_progress(
                self._progress if hides and told is not None else told,
                lambda: self._ended is not None or self._hides_merged != hides,
            )
        if self._ended is not None:
            raise self._ended
        await self._ingest.up()
        return without_merged(self._progress) if self._hides_merged else self._progress

    def end(self, error: RtError) -> None:
        """End the stream, which may be idle, with this error."""
        if self._ended is None:
            self._ended = error
            self._has_begun.set()
            if self._replica is not None:
                self._replica.store.wake()

    async def close(self) -> None:
        self._ingest.leave(self)
        if self._replica is not None:
            self._replica.has_stream = False
            with self._replica.in_use(), contextlib.suppress(RtError):
                # The stream has already reported errors of the replica. `restart` runs to its end: otherwise
                # the unfinished bytes of a publisher that does not return stay in memory.
                await to_end(asyncio.ensure_future(self._replica.store.restart()))


async def _changed_or_due(changed: asyncio.Event) -> None:
    """Wait until something changes, or until a proposal must be repeated."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PROPOSE_AGAIN_S):
            await changed.wait()
