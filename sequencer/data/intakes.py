"""What pushes may bring: lives are opened by committed commands, fenced ones take nothing more.

The law: a byte of an X is taken only once its life is open, everything before it in the session is merged by
the cluster, and this node knows of every fence that was committed before it began to lead or follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from replicator.handshake import PushHello, PushProgress, PushStart
from replicator.items import Chunk, Life, Place, Sealed
from rt.errors import Fenced, RtError
from rt.log.segment import SEGMENT_HEADER_BYTES
from rt.net.identity import Identity
from rt.net.rpc_errors import Unreachable
from sequencer.command_codec import encode_command
from sequencer.commands import Command, Open
from sequencer.data.consumed import consumed_place
from sequencer.data.copies import Copies, Copy
from sequencer.data.replica import Replica
from sequencer.outcomes import Opened, Outcome, Refused
from sequencer.state import End, Session, State

PROPOSE_AGAIN_S: Final = 1.0
"""A command that was not seen applied after so long is proposed again: it may have been lost."""

logger = logging.getLogger("sequencer")


class Intakes:
    """The sessions of this node, as the push server needs them (`replicator.push_server.Stores`)."""

    def __init__(
        self,
        replica: Replica,
        copies: Copies,
        members: int,
        propose: Callable[[bytes], None],
        is_up: Callable[[], bool],
    ) -> None:
        self._replica, self._copies, self._members = replica, copies, members
        self._propose, self._is_up = propose, is_up
        self._changed = asyncio.Event()
        self._asked: Counter[Open] = Counter()
        """Lives that streams wait for. What is refused to other nodes is not kept."""
        self._refusals: dict[Open, Refused] = {}

    @property
    def cluster(self) -> bytes:
        """The id of the cluster; not ready before there is one."""
        return self._state().cluster

    # What the process hears

    def on_changed(self) -> None:
        """State, standing or link are not what they were."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """An open was decided."""
        if isinstance(command, Open):
            if isinstance(outcome, Refused) and command in self._asked:
                self._refusals[command] = outcome
            elif isinstance(outcome, Opened):
                self._refusals.pop(command, None)
        self.on_changed()

    # Stores

    async def accept(self, hello: PushHello, identity: Identity) -> Intake:
        """Get the session ready for a stream; see `Stores.accept`."""
        state = self._state()
        self._check_ready()
        session = state.session_of(hello.session)
        if session is not None and session.incarnation != hello.incarnation:
            self._check_incarnation(state, hello)
            session = None
        copy = None if session is None else await self._copies.open_copy(session)
        if copy is not None and session is not None:
            await copy.store.restart()
            await self._copies.skip_merged(copy, session)
            copy.has_stream = True
        logger.info("push_begins session=%s certificate=%s", hello.session, identity.name)
        return Intake(self, hello, session, copy)

    # For intakes

    def start(self, session: Session | None, copy: Copy | None) -> PushStart:
        """From where on a session is wanted."""
        standing, state = self._replica.standing, self._state()
        place = copy.receiver.place if copy is not None else None
        if place is None and session is not None:
            place = consumed_place(session)
        if session is not None and session.fenced_end and (place is None or place.x < session.fenced_end):
            place = Place(session.fenced_end, 0, 0)
        return PushStart(state.cluster, self._replica.epoch, self._members, standing.node, place)

    async def open_session(self, hello: PushHello, life: Life) -> Session:
        """Have a life opened, and wait until it is what the cluster merges next; `rt.Fenced`."""
        newest = self._state().session_of(hello.session)
        # If another directory takes over before this is applied, it is refused, and a publisher that is
        # still there comes again: what only was late must not end the newer one.
        newest_id = newest.id if newest is not None else 0
        command = Open(hello.session, hello.incarnation, hello.dedup_id, life.x, life.life, newest_id)
        self._asked[command] += 1
        try:
            return await self._opened(hello, life, command)
        finally:
            self._asked[command] -= 1
            if not self._asked[command]:
                del self._asked[command]
                self._refusals.pop(command, None)

    async def _opened(self, hello: PushHello, life: Life, command: Open) -> Session:
        self._refusals.pop(command, None)
        proposed_at = float("-inf")
        loop = asyncio.get_running_loop()
        while True:
            self._check_ready()
            session = self._session_of(hello)
            if session is not None and life.x < session.fenced_end:
                raise _refusal(Refused(f"a reset of the cluster ended X {life.x}", True), hello, life)
            if session is not None and self._is_welcome(session, life):
                return session
            refused = self._refusals.pop(command, None)
            if refused is not None:
                raise _refusal(refused, hello, life)
            known = session.life_of(life.x) if session is not None else None
            if known is None and loop.time() - proposed_at >= PROPOSE_AGAIN_S:
                proposed_at = loop.time()
                self._propose(encode_command(command))
            elif known is not None and known.life != life.life:
                raise _refusal(Refused(f"X {life.x} is open with another life", True), hello, life)
            await self.wait(PROPOSE_AGAIN_S)

    def limit(self, session_id: int, x: int) -> End | None:
        """Where X may not be taken beyond; None: nowhere. Raises what refuses it now."""
        session = self._state().sessions[session_id]
        life = session.life_of(x)
        if life is not None and life.end is None:
            if life.is_fenced:
                raise Unreachable("that X is being closed", where=session.name, hint="Try again.")
            return None
        if life is not None:
            return life.end
        if session.done is not None and session.done[0] == x:
            return session.done[1]
        raise Unreachable("that X is over", where=session.name, got=f"X {x}", hint="Ask where to go on.")

    async def wait(self, timeout_s: float) -> None:
        """Until something changed, or so long."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            pass

    async def copy_of(self, session: Session) -> Copy:
        """Its copy, open."""
        return await self._copies.open_copy(session)

    async def skip_life(self, copy: Copy, session: Session, x: int) -> None:
        """Go on at the beginning of `x`: everything before it is merged, of which this copy has not all."""
        await self._copies.skip_to(copy, session, Place(x, 0, 0), None)

    async def take(self, copy: Copy, item: Chunk | Sealed) -> None:
        """Store an item that is welcome."""
        await self._copies.take(copy, item)

    async def up(self) -> None:
        """Return when the control process hears what becomes durable: before, nothing is acknowledged."""
        while not self._is_up():
            await self.wait(PROPOSE_AGAIN_S)

    def _state(self) -> State:
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
        if session is not None and session.incarnation != hello.incarnation:
            self._check_incarnation(state, hello)
            return None
        return session

    def _check_incarnation(self, state: State, hello: PushHello) -> None:
        for one in state.sessions.values():
            if (one.name, one.incarnation) == (hello.session, hello.incarnation):
                raise Fenced(
                    "a newer directory of this session was opened",
                    where=hello.session,
                    got=f"incarnation {hello.incarnation.hex()}",
                    hint="Two hosts use one session name, or an old copy was started: give each its own.",
                )

    def _is_welcome(self, session: Session, life: Life) -> bool:
        """Whether bytes of the life may come: everything before it is merged."""
        if session.done is not None and session.done[0] == life.x:
            return True  # What this node still lacks of it.
        return session.life is not None and (session.life.x, session.life.life) == (life.x, life.life)


class Intake:
    """One publisher's stream (`replicator.push_server.Intake`)."""

    def __init__(
        self, intakes: Intakes, hello: PushHello, session: Session | None, copy: Copy | None
    ) -> None:
        self._intakes, self._hello = intakes, hello
        self._copy = copy
        self._has_copy = asyncio.Event()
        if copy is not None:
            self._has_copy.set()
        self._start = intakes.start(session, copy)

    @property
    def start(self) -> PushStart:
        """See the protocol."""
        return self._start

    async def open_life(self, life: Life) -> None:
        """See the protocol."""
        session = await self._intakes.open_session(self._hello, life)
        copy = self._copy = await self._intakes.copy_of(session)
        copy.has_stream = True
        receiver = copy.receiver
        place = receiver.place
        is_over = session.done is not None and place is not None and place.x < life.x
        is_anew = place is None and 0 < session.fenced_end <= life.x
        if (is_over and not receiver.has_ended) or is_anew:
            # The cluster merged an X of which this node has not all: go on without the rest.
            await self._intakes.skip_life(copy, session, life.x)
        await copy.store.begin(life)
        self._has_copy.set()

    async def take(self, item: Chunk | Sealed) -> None:
        """See the protocol."""
        copy = self._copy
        if copy is None:
            if isinstance(item, Sealed):
                return  # Of an X that was merged before this node had a copy.
            raise Fenced("bytes of a life that was not announced", where=self._hello.session)
        if isinstance(item, Sealed):
            place = copy.receiver.place
            if place is None or item.place.segment < place.segment:
                return
        limit = self._intakes.limit(copy.session_id, item.place.x)
        if limit is not None and isinstance(item, Chunk) and item.end > _place(item.place.x, limit):
            raise Fenced(
                "bytes behind the end of an X", where=self._hello.session, got=item.end, wanted=limit
            )
        await self._intakes.take(copy, item)

    async def next_progress(self, told: PushProgress | None) -> PushProgress:
        """See the protocol."""
        await self._has_copy.wait()
        assert self._copy is not None
        progress = await self._copy.store.next_progress(told)
        await self._intakes.up()
        return progress

    async def close(self) -> None:
        """See the protocol."""
        if self._copy is not None:
            self._copy.has_stream = False
            with contextlib.suppress(RtError):  # What the copy refuses with, the stream was told.
                await self._copy.store.restart()


def _place(x: int, end: End) -> Place:
    return Place(x, end.y, max(end.offset, SEGMENT_HEADER_BYTES))


def _refusal(refused: Refused, hello: PushHello, life: Life) -> RtError:
    kind = Fenced if refused.is_fenced else Unreachable
    return kind(f"the cluster does not open that life: {refused.why}", where=f"{hello.session}, X {life.x}")
