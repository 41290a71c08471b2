"""What pushes may bring: lives are opened by committed commands, fenced ones take nothing more.

Laws. A byte of an X is taken only once its life is open, everything before it in the session is merged by
the cluster, and this node knows of every fence that was committed before it began to lead or follow. A stream
of a directory that another one took over from ends with `rt.Fenced` as soon as this node knows, also if
nothing comes on it: other nodes, which the newer directory may have reached alone, cannot say so on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from replicator.protocol.handshake import NOWHERE, PushHello, PushProgress, PushStart
from replicator.protocol.messages import Chunk, LogOffset, Run, SegmentSealed, WholeRun
from rt.errors import Fenced, RtError, TooManySessions
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.merge_progress import consumed_place
from sequencer.sessions.replicas import SessionReplica, SessionReplicas
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
from sequencer.state.state import LIVES_MAX, ActiveRun, End, SequencerState, Session

TOGETHER_MAX: Final = 32
"""Whole runs that are stored together. Many more would take so long on a slow disk that the merger asks peers
for them."""
PROPOSE_AGAIN_S: Final = 1.0
"""A command that was not seen applied after so long is proposed again: it may have been lost."""

logger = logging.getLogger("sequencer")


class SessionIngest:
    """The sessions of this node, as the push server needs them
    (`replicator.push.server.SessionReplicaStore`).
    """

    def __init__(
        self,
        replica: StateFollower,
        copies: SessionReplicas,
        members: int,
        propose: Callable[[bytes], None],
        is_up: Callable[[], bool],
    ) -> None:
        self._replica, self._copies, self._members = replica, copies, members
        self._propose, self._is_up = propose, is_up
        self._changed = asyncio.Event()
        self._changed_of: dict[str, asyncio.Event] = {}
        """By session: what streams of that name wait for."""
        self._asked: Counter[OpenRun | OpenSealedRuns] = Counter()
        """What streams wait for. What is refused to other nodes is not kept."""
        self._refusals: dict[OpenRun | OpenSealedRuns, CommandRejected] = {}
        self._streams: dict[str, set[IngestStream]] = {}
        """By session name."""

    @property
    def cluster(self) -> bytes:
        """The id of the cluster; not ready before there is one."""
        return self._state().cluster

    # What the process hears

    def on_changed(self) -> None:
        """Standing or link are not what they were, or all of the state."""
        for waiting in (self._changed, *self._changed_of.values()):
            waiting.set()
        self._changed = asyncio.Event()
        self._changed_of.clear()

    def on_session(self, session_id: int) -> None:
        """Something of a session is not what it was: only streams of that name look at it."""
        session = self._replica.session(session_id)
        if session is not None:
            self._on_name(session.name)

    def _on_name(self, name: str) -> None:
        if (waiting := self._changed_of.pop(name, None)) is not None:
            waiting.set()

    def on_snapshot(self) -> None:
        """The state is another one."""
        for name in list(self._streams):
            self._end_fenced(name)
        self.on_changed()

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """An open was decided."""
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
            case RunClosed(session_id) | RunFenced(session_id):
                self.on_session(session_id)
            case ClusterReset():
                self.on_changed()

    def _note_sealed(self, name: str) -> None:
        """Have the streams of that name remember the sealed runs, of which the cluster may be done first."""
        session = self._state().session_of(name)
        for intake in self._streams.get(name, ()):
            if session is not None and session.incarnation == intake.hello.incarnation:
                intake.note_sealed(session)

    def _end_fenced(self, name: str) -> None:
        """End the streams of directories that another one of that name took over from."""
        for intake in list(self._streams.get(name, ())):
            try:
                self._session_of(intake.hello)
            except Fenced as error:
                intake.end(error)

    # Stores

    async def accept(self, hello: PushHello, identity: Identity) -> IngestStream:
        """Get the session ready for a stream; see `Stores.accept`."""
        self._check_ready()
        session = self._session_of(hello)
        copy = None if session is None else await self._copies.open_copy(session)
        if copy is not None and session is not None:
            with copy.in_use():
                await copy.store.restart()
                await self._copies.skip_merged(copy, session)
                copy.has_stream = True
        logger.info("push_started session=%s certificate=%s", hello.session, identity.name)
        intake = IngestStream(self, hello, session, copy)
        self._streams.setdefault(hello.session, set()).add(intake)
        self._note_sealed(hello.session)
        self._end_fenced(hello.session)  # It may have been decided while the copy was opened.
        return intake

    # For intakes

    def leave(self, intake: IngestStream) -> None:
        """A stream has ended."""
        streams = self._streams.get(intake.hello.session, set())
        streams.discard(intake)
        if not streams:
            self._streams.pop(intake.hello.session, None)

    def start(self, session: Session | None, copy: SessionReplica | None) -> PushStart:
        """From where on a session is wanted."""
        standing, state = self._replica.standing, self._state()
        place = copy.receiver.next_offset if copy is not None else None
        if place is None and session is not None:
            place = consumed_place(session)
        if session is not None and session.fenced_end and (place is None or place.run < session.fenced_end):
            place = LogOffset(session.fenced_end, 0, 0)
        if session is not None and session.id in state.closed:
            # It was closed without its publisher: of what it opened nothing more is taken.
            place = max(place or NOWHERE, LogOffset(session.last_run + 1, 0, 0))
        elif session is not None and place is not None:
            place = self._next_run(session, place)
        return PushStart(state.cluster, self._replica.epoch, self._members, standing.node, place)

    def _next_run(self, session: Session, place: LogOffset) -> LogOffset:
        """Where the next run begins, if nothing of the last merged one is needed from the publisher.

        That one may have been closed without its publisher, whose disk has more of it than is taken.
        """
        life, done = session.life, session.done
        if life is None or done is None or place.run > done[0]:
            return place
        run, end = done
        is_needed = place < _place(run, end) and not self._copies.is_released(session.id)
        return place if is_needed else LogOffset(life.run, 0, 0)

    async def open_session(
        self, intake: IngestStream, life: Run, sealed: Sequence[SealedRun] = ()
    ) -> Session:
        """Have a life opened, and wait until its bytes are welcome; `rt.Fenced`.

        `sealed`: it is the first of these runs, which are opened together.
        """
        hello = intake.hello
        newest = self._state().session_of(hello.session)
        # If another directory takes over before this is applied, it is refused, and a publisher that is
        # still there comes again: what only was late must not end the newer one.
        newest_id = newest.id if newest is not None else 0
        whose = hello.session, hello.incarnation, hello.dedup_id
        command: OpenRun | OpenSealedRuns = OpenRun(*whose, life.number, life.run_id, newest_id)
        if sealed:
            command = OpenSealedRuns(*whose, tuple(sealed), newest_id)
        self._asked[command] += 1
        try:
            return await self._opened(intake, life, command)
        finally:
            self._asked[command] -= 1
            if not self._asked[command]:
                del self._asked[command]
                self._refusals.pop(command, None)

    async def _opened(self, intake: IngestStream, life: Run, command: OpenRun | OpenSealedRuns) -> Session:
        hello = intake.hello
        self._refusals.pop(command, None)
        proposed_at = float("-inf")
        loop = asyncio.get_running_loop()
        while True:
            self._check_ready()
            session = self._session_of(hello)
            if session is not None and life.number < session.fenced_end:
                ended = CommandRejected(f"a reset of the cluster ended X {life.number}", True)
                raise _refusal(ended, hello, life)
            if session is not None and self._is_welcome(intake, session, life):
                return session
            refused = self._refusals.pop(command, None)
            if refused is not None:
                raise _refusal(refused, hello, life)
            known = session.life_of(life.number) if session is not None else None
            why = why_full(self._state(), hello.session, hello.dedup_id) if known is None else None
            if why is not None:
                raise _refusal(CommandRejected(why, is_full=True), hello, life)
            has_room = session is None or len(session.lives) < LIVES_MAX - SEALED_RUNS_MAX
            has_room = has_room or isinstance(command, OpenRun)
            if known is None and has_room and loop.time() - proposed_at >= PROPOSE_AGAIN_S:
                proposed_at = loop.time()
                self._propose(encode_command(command))
            elif known is not None and known.run_id != life.run_id:
                raise _refusal(
                    CommandRejected(f"X {life.number} is open with another life", True), hello, life
                )
            await self._wait_for(hello.session)

    def limit(self, session_id: int, run: int, sealed: End | None = None) -> End | None:
        """Where X may not be taken beyond; None: nowhere. Raises what refuses it now.

        `sealed`: where it ends, if it was opened with its end. The cluster may be done with it.
        """
        session = self._state().sessions.get(session_id)
        if session is None:
            raise Unreachable(
                "that session was closed", got=f"session {session_id}", hint="Ask where to go on."
            )
        life = session.life_of(run)
        if life is not None and life.end is None:
            if life.is_fenced:
                raise Unreachable("that X is being closed", where=session.name, hint="Try again.")
            return None
        if life is not None:
            return life.end
        if session.done is not None and session.done[0] == run:
            return session.done[1]
        if sealed is not None and run >= session.fenced_end:
            return sealed
        raise Unreachable("that X is over", where=session.name, got=f"X {run}", hint="Ask where to go on.")

    async def _wait_for(self, name: str) -> None:
        """Until something of the session changed, or until it is time to propose again."""
        await self._until(self._changed_of.setdefault(name, asyncio.Event()), PROPOSE_AGAIN_S)

    async def wait(self, timeout_s: float) -> None:
        """Until standing or link changed, or so long."""
        await self._until(self._changed, timeout_s)

    async def _until(self, changed: asyncio.Event, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            pass

    async def copy_of(self, session: Session) -> SessionReplica:
        """Its copy, open."""
        return await self._copies.open_copy(session)

    async def skip_life(self, copy: SessionReplica, session: Session, run: int) -> None:
        """Go on at the beginning of `run`: everything before it is merged, of which this copy has not all."""
        await self._copies.skip_to(copy, session, LogOffset(run, 0, 0), None)

    async def take(self, copy: SessionReplica, item: Chunk | SegmentSealed) -> None:
        """Store an item that is welcome."""
        await self._copies.take(copy, item)

    async def append_whole(self, copy: SessionReplica, runs: Sequence[WholeRun]) -> bool:
        """Store whole runs that are welcome; False, with nothing done, if they do not come next."""
        return await copy.store.append_whole(runs)

    def sealed_in(self, session_id: int, runs: Sequence[WholeRun], known: Mapping[int, ActiveRun]) -> int:
        """How many of these runs, from the first on, are sealed now with the very end that they have.

        `known`: those that were sealed, of which the cluster may be done.
        """
        session = self._state().sessions.get(session_id)
        if session is None:
            return 0
        lives = {**known, **{life.run: life for life in session.lives}}
        for count, run in enumerate(runs):
            sealed = ActiveRun(run.run.number, run.run.run_id, end=End(0, len(run.data), run.end))
            if run.run.number < session.fenced_end or lives.get(run.run.number) != sealed:
                return count
        return len(runs)

    async def up(self) -> None:
        """Return when the control process hears what becomes durable: before, nothing is acknowledged."""
        while not self._is_up():
            await self.wait(PROPOSE_AGAIN_S)

    def _state(self) -> SequencerState:
        state = self._replica.state
        if state is None or not any(state.cluster):
            raise Unreachable("this node has not joined its cluster yet", hint="Try again, or another node.")
        return state

    def _check_ready(self) -> None:
        if not self._is_up() or not self._replica.standing.is_caught_up:
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
                hint="Two hosts use one session name, or an old copy was started: give each its own.",
            )
        if state.is_forgotten(hello.session, hello.incarnation):
            raise Fenced(
                FORGOTTEN,
                where=hello.session,
                got=got,
                hint="Start with a new directory. Nothing of this one is taken: it may be merged already.",
            )

    def _is_welcome(self, intake: IngestStream, session: Session, life: Run) -> bool:
        """Whether bytes of the life may come: everything before it is merged, or whole here for good."""
        if session.done is not None and life.number <= session.done[0]:
            known = intake.sealed.get(life.number)
            # What this node still lacks of it.
            return session.done[0] == life.number or (known is not None and known.run_id == life.run_id)
        copy = intake.copy
        for before, one in zip((None, *session.lives), session.lives, strict=False):
            if (one.run, one.run_id) == (life.number, life.run_id):
                return before is None or (copy is not None and _may_begin(copy, life.number, before))
            if one.end is None:
                return False
        return False


class IngestStream:
    """One publisher's stream (`replicator.push.server.SessionIntake`)."""

    def __init__(
        self, intakes: SessionIngest, hello: PushHello, session: Session | None, copy: SessionReplica | None
    ) -> None:
        self._intakes, self.hello = intakes, hello
        self._copy = copy
        self.sealed: dict[int, ActiveRun] = {}
        """By X: sealed runs that were open while this stream was, from the one that comes on."""
        self._ended: RtError | None = None
        self._has_copy = asyncio.Event()
        if copy is not None:
            self._has_copy.set()
        self._start = intakes.start(session, copy)

    @property
    def start(self) -> PushStart:
        """See the protocol."""
        return self._start

    @property
    def copy(self) -> SessionReplica | None:
        """The copy that it feeds, once there is one."""
        return self._copy

    def note_sealed(self, session: Session) -> None:
        """Remember the sealed runs: the cluster may merge them before they come here."""
        place = self._copy.receiver.next_offset if self._copy is not None else None
        if place is not None:
            self.sealed = {x: life for x, life in self.sealed.items() if x >= place.run}
        for life in session.lives:
            if life.end is not None and not life.is_fenced:
                self.sealed[life.run] = life

    async def open_run(self, life: Run) -> None:
        """See the protocol."""
        session = await self._intakes.open_session(self, life)
        await self._begin(session, life)

    async def _begin(self, session: Session, life: Run) -> SessionReplica:
        """Have the copy of the session take bytes of that life."""
        copy = self._copy = await self._intakes.copy_of(session)
        copy.has_stream = True
        receiver = copy.receiver
        place = receiver.next_offset
        is_over = session.done is not None and place is not None and place.run < life.number
        is_anew = place is None and 0 < session.fenced_end <= life.number
        if (is_over and not receiver.has_ended) or is_anew:
            # The cluster merged an X of which this node has not all: go on without the rest.
            await self._intakes.skip_life(copy, session, life.number)
        await copy.store.start_run(life)
        self._has_copy.set()
        return copy

    async def append_runs(self, runs: Sequence[WholeRun]) -> None:
        """See the protocol."""
        while runs:
            sealed = [
                SealedRun(one.run.number, one.run.run_id, End(0, len(one.data), one.end)) for one in runs
            ]
            session = await self._intakes.open_session(self, runs[0].run, sealed)
            copy = await self._begin(session, runs[0].run)
            # They are stored without a wait behind this look, or behind what is stored now: a fence that is
            # applied meanwhile finds them.
            count = min(self._intakes.sealed_in(session.id, runs, self.sealed), TOGETHER_MAX)
            if not count or not await self._intakes.append_whole(copy, runs[:count]):
                # It was opened without its end, or the cluster is done with it; or it does not come next.
                count = 1
                _, chunk, seal = runs[0].items
                await self.append(chunk)
                await self.append(seal)
            runs = runs[count:]

    async def append(self, item: Chunk | SegmentSealed) -> None:
        """See the protocol."""
        copy = self._copy
        if copy is None:
            if isinstance(item, SegmentSealed):
                return  # Of an X that was merged before this node had a copy.
            raise Fenced("bytes of a life that was not announced", where=self.hello.session)
        if isinstance(item, SegmentSealed):
            place = copy.receiver.next_offset
            if place is None or item.end_offset.segment < place.segment:
                return
        run = item.start.run if isinstance(item, Chunk) else item.end_offset.run
        known = self.sealed.get(run)
        limit = self._intakes.limit(copy.session_id, run, None if known is None else known.end)
        if limit is not None and isinstance(item, Chunk):
            await self._take_before(copy, item, _place(run, limit))
            return
        await self._intakes.take(copy, item)

    async def _take_before(self, copy: SessionReplica, item: Chunk, end: LogOffset) -> None:
        """Take what is before the end of a closed run. Whoever has more of it, is told where to go on."""
        if item.start < end:
            whole = item if item.end <= end else Chunk(item.start, _cut(item, end))
            await self._intakes.take(copy, whole)
        if item.end > end:
            raise Unreachable(
                "bytes after the end of a run that was closed",
                where=self.hello.session,
                got=item.end,
                expected=f"at most {end}",
                hint="Connect again: the node says where the session goes on.",
            )

    async def next_progress(self, told: PushProgress | None) -> PushProgress:
        """See the protocol."""
        await self._has_copy.wait()
        assert self._copy is not None
        progress = await self._copy.store.next_progress(told, lambda: self._ended is not None)
        if self._ended is not None:
            raise self._ended
        await self._intakes.up()
        return progress

    def end(self, error: RtError) -> None:
        """Tell the peer why nothing more is taken on this stream, which may be idle."""
        if self._ended is None:
            self._ended = error
            if self._copy is not None:
                self._copy.store.recheck()

    async def close(self) -> None:
        """See the protocol."""
        self._intakes.leave(self)
        if self._copy is not None:
            self._copy.has_stream = False
            with self._copy.in_use(), contextlib.suppress(RtError):
                # What the copy refuses with, the stream was told.
                await self._copy.store.restart()


def _may_begin(copy: SessionReplica, x: int, before: ActiveRun) -> bool:
    """Whether a copy holds some of X, or ends where the run before it does, of which no node takes more."""
    place, end = copy.receiver.next_offset, before.end
    if place is not None and place.run == x:
        return True
    return end is not None and copy.receiver.has_ended and place == (before.run, end.roll, end.offset)


def _cut(item: Chunk, end: LogOffset) -> memoryview:
    return memoryview(item.data)[: end.offset - item.start.offset]


def _place(x: int, end: End) -> LogOffset:
    return LogOffset(x, end.roll, max(end.offset, SEGMENT_HEADER_BYTES))


def _refusal(refused: CommandRejected, hello: PushHello, life: Run) -> RtError:
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
        f"the cluster does not open that life: {refused.why}", where=f"{hello.session}, X {life.number}"
    )
