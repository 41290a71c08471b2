"""Taking the state of a later epoch, or any first state, from a peer that need not lead.

For the loop's thread. A node of an earlier epoch is talked to in nothing else. The laws: it keeps all that is
its own until the other state is durable whole; it takes only one that is of this cluster and its members. A
transfer goes on with the peer and the state that it began with for as long as bytes come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rt.cluster_epoch import name_of
from rt.errors import Closed, ClusterMismatch, DiskFull, FormatError
from sequencer.raft.model.cluster_state import ClusterState
from sequencer.raft.model.messages import FetchState, FetchStateChunk, Hello, Message
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotReceiver, SnapshotStore
from sequencer.raft.storage.worker import BackgroundWorker

ASK_AGAIN_S: Final = 1.0
"""A piece that did not come for so long is asked for again, of another peer if none ever came."""
PATIENCE_S: Final = 5.0
"""So long a transfer that has begun waits for its peer, which may be connected anew."""

logger = logging.getLogger("sequencer.raft")


class FetchedState(NamedTuple):
    """A state that is durable here now, as the newest snapshot."""

    meta: SnapshotMeta
    state: ClusterState
    machine_bytes: bytes


class StateFetcher:
    """Asks peers for their state, piece by piece.

    `decode` reads and checks what came; on the helper's thread, it may raise `rt.FormatError` and
    `rt.ClusterMismatch`. `done` hears of the state in the loop.
    """

    def __init__(
        self,
        snapshots: SnapshotStore,
        aside: BackgroundWorker,
        send: Callable[[str, Message], object],
        decode: Callable[[SnapshotMeta, bytes], tuple[ClusterState, bytes]],
        done: Callable[[FetchedState], None],
    ) -> None:
        self._snapshots, self._aside, self._send = snapshots, aside, send
        self._decode, self._done = decode, done
        self._asked = ""
        self._ask_again_at = float("-inf")
        self._patient_until = float("-inf")
        self._incoming: SnapshotReceiver | None = None
        self.is_installing = False
        """The whole of a state is being made durable."""

    @property
    def incoming(self) -> SnapshotReceiver | None:
        """What has come of a state."""
        return self._incoming

    @property
    def is_under_way(self) -> bool:
        """Whether something of a state has come."""
        return self._incoming is not None

    def ask(self, peers: Sequence[str], now: float) -> None:
        """Ask one of these peers, unless an answer is to be expected, or all has come."""
        if self.is_installing or now < self._ask_again_at:
            return
        if not self._is_patient(now):
            peer = _behind(self._asked, peers)
            if peer != self._asked:
                self.give_up()
                logger.info("state_requested peer=%s", peer)
            self._asked = peer
        self._ask_again_at = now + ASK_AGAIN_S
        incoming = self._incoming
        asks = FetchState(0) if incoming is None else FetchState(incoming.received, incoming.meta.digest)
        self._send(self._asked, asks)

    def _is_patient(self, now: float) -> bool:
        return self._incoming is not None and now < self._patient_until

    def give_up(self) -> None:
        """What came is of no use any more."""
        if not self.is_installing:
            incoming, self._incoming, self._asked = self._incoming, None, ""
            self._ask_again_at = float("-inf")
            if incoming is not None:
                incoming.abandon()

    def on_piece(self, peer: str, hello: Hello, piece: FetchStateChunk, now: float) -> None:
        """A piece came from a peer that introduced itself so."""
        if peer != self._asked or self.is_installing:
            return
        meta = SnapshotMeta(hello.cluster, hello.epoch, piece.snapshot, piece.length, piece.digest)
        try:
            incoming, is_new = self._take(meta, piece)
        except (FormatError, DiskFull, Closed) as error:
            self._on_failed(error)
            return
        if incoming.received == meta.length:
            self._install(meta)
        elif is_new:  # Of one that brings nothing the next is asked for in a while, by `ask`.
            self._patient_until = now + PATIENCE_S
            self._ask_again_at = now + ASK_AGAIN_S
            self._send(peer, FetchState(incoming.received, meta.digest))

    def _take(self, meta: SnapshotMeta, piece: FetchStateChunk) -> tuple[SnapshotReceiver, bool]:
        if self._incoming is None or self._incoming.meta != meta:
            newest = self._snapshots.newest
            if newest is not None and meta.place.index <= newest.place.index:
                raise FormatError(
                    "a state of a later epoch that is not behind the one here",
                    got=meta.place,
                    expected=f"behind {newest.place}",
                )
            self._incoming = self._snapshots.receive(meta)
        before = self._incoming.received
        return self._incoming, self._incoming.write(piece.offset, piece.data) > before

    def _install(self, meta: SnapshotMeta) -> None:
        incoming = self._incoming
        assert incoming is not None
        self.is_installing = True
        found: list[tuple[ClusterState, bytes]] = []
        self._aside.run(
            lambda: incoming.finish(lambda content: found.append(self._decode(meta, content))),
            lambda _: self._on_installed(FetchedState(meta, *found[0])),
            self._on_failed,
        )

    def _on_installed(self, fetched: FetchedState) -> None:
        self._incoming, self.is_installing, self._asked = None, False, ""
        logger.info("state_fetched epoch=%s index=%d", name_of(fetched.meta.epoch), fetched.meta.place.index)
        self._done(fetched)

    def _on_failed(self, error: BaseException) -> None:
        """It is asked for again in a while; a failed disk ends the node."""
        self.is_installing = False
        incoming, self._incoming = self._incoming, None
        if not isinstance(error, FormatError | ClusterMismatch | DiskFull | Closed):
            raise error
        logger.error("peer_fetch_failed peer=%s error=%r", self._asked, str(error))
        if incoming is not None:
            incoming.abandon()


def _behind(asked: str, peers: Sequence[str]) -> str:
    """The peer that follows the one asked before; the first one if that is not among them."""
    return peers[(peers.index(asked) + 1) % len(peers)] if asked in peers else peers[0]
