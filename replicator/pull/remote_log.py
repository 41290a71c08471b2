"""A merged log read directly from the nodes of its cluster, for readers that keep nothing.

Invariants:
- All nodes have the same bytes: if a node stops within a range, another node continues exactly there.
- A node that fails, is silent, has less, or sends bytes that do not verify is left for the next node. If all
  nodes fail for `patience_seconds`, that is an error. If no node has ever answered, the limit is
  `connect_seconds`.
- A node that fails repeatedly is logged once, until it answers.
- Once the members have changed, the nodes in their list are asked too.
- All answers are of one cluster and one line of epochs. A forced reset in between is an error.
- At first, a majority is asked for the end of the log. The log is empty if every node reports that.
- Returned data were verified here.

Connections run in an event loop in its own thread, so callers are plain functions, in any thread or loop.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Final

from replicator.protocol.handshake import (
    Acknowledged,
    LogOutline,
    PullHello,
    PullMerged,
    PullRange,
    PullStart,
    Wanted,
    check_found,
)
from replicator.protocol.messages import Chunk
from replicator.pull.known_log import KnownLog
from replicator.pull.loop_thread import LoopThread
from replicator.pull.node_call import SILENCE_SECONDS, NodeCall, pull_channel
from replicator.pull.node_channels import NodeChannels
from replicator.pull.range_stream import Found, RangeStream
from rt.endpoints import check_endpoints
from rt.errors import (
    CertificateError,
    ClusterMismatch,
    Diverged,
    InvalidName,
    InvalidOption,
    ProtocolViolation,
    RtError,
)
from rt.events import SkipForward
from rt.log.read.outline import Waypoint
from rt.log.read.projection import Projection
from rt.log.read.range_reader import LossHandler
from rt.log.read.start_position import StartTime
from rt.log.read.topic_patterns import TopicPatterns, check_wanted
from rt.log.scan.message_batch import MessageBatch
from rt.net.connect_probe import explain_silence
from rt.net.grpc_errors import MembersChanged, NothingMergedYet, Unreachable
from rt.net.tls import TLS

logger = logging.getLogger("replicator")

PATIENCE_SECONDS: Final = 60.0
"""How long all nodes may fail before a reader gives up: longer than an election or a node's restart."""
OUTLINE_BYTES: Final = 4 * 2**20
BOUNDS_SECONDS: Final = 0.1
"""How long an answer about the log's end is valid: a streaming query asks many times a second."""

_TURN_SECONDS_MIN: Final = 0.1
_PROBE_SHARE: Final = 0.2  # Share of the time to connect, to find out why no node answers.
_EMPTY_SECONDS: Final = 1.0  # As `BOUNDS_SECONDS`, for a log without messages.
_PAUSE_SECONDS_MAX: Final = 1.0
_REFUSALS = (CertificateError, ClusterMismatch, InvalidName)
"""Waiting does not change these errors. They are raised when every node has returned one of them."""


class RemoteLog:
    """The merged log of `stream`, from the nodes at `endpoints` ("host:port" each). For one thread.

    In a forked child each use but `close` raises `rt.Closed`: open a new one there.

    It is a `rt.log.read.log_source.RemoteLogSource`, whose methods are described there.
    `ca`, `cert` and `key` are paths of PEM files. The certificate's role must be subscriber, node or
    operator. `connect_seconds` None: as long as `patience_seconds`.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        stream: str,
        *,
        ca: str,
        cert: str,
        key: str,
        patience_seconds: float = PATIENCE_SECONDS,
        connect_seconds: float | None = None,
        epoch: int = 0,
    ) -> None:
        self._stream = stream
        self._known_log = KnownLog(epoch)
        self._patience_seconds = patience_seconds
        self._connect_seconds = patience_seconds if connect_seconds is None else connect_seconds
        endpoints = check_endpoints(endpoints, is_required=True)
        self._tls = TLS(ca=ca, cert=cert, key=key)
        self._loop = LoopThread("rt-nodes-log")
        at = random.randrange(len(endpoints))
        self._nodes = NodeChannels(endpoints, partial(pull_channel, tls=self._tls), at)
        """Its `target` is the node that is asked now. Readers spread over the nodes, and stay with one that
        answers.
        """
        self._has_answered = False  # Whether any node has ever answered.
        self._failures: dict[str, RtError] = {}
        """By node, its last error since its last answer. The first error was logged."""
        self._end = 0
        self._bounds: tuple[float, int, int] | None = None
        """The time until which the bounds are valid, the start of the log, and its end."""
        self._held: Acknowledged | None = None
        self._told_node: str | None = None  # The endpoint of the node that received `_held`.
        self.received_bytes = 0  # Bytes of the log, including skipped ones.

    @property
    def epoch(self) -> int:
        return self._known_log.epoch

    def bounds(self) -> tuple[int, int]:
        """The logs of nodes may differ in length: the longest one counts."""
        if self._bounds is None or time.monotonic() > self._bounds[0]:
            try:
                start = self._newest()
            except NothingMergedYet:
                if self._end:
                    raise
                self._bounds = time.monotonic() + _EMPTY_SECONDS, 0, 0
            else:
                self._bounds = time.monotonic() + BOUNDS_SECONDS, start.first, self._end
        return self._bounds[1:]

    def outline(self, start: int, end: int) -> Iterator[Waypoint]:
        if start < end:
            yield from self._ask(start, PullRange(end, OUTLINE_BYTES))[1]

    def find_time(self, start: int, end: int, timestamp_ns: int) -> int:
        found = self._ask(StartTime(timestamp_ns), PullRange(0), least_end=end)[0].found
        assert found is not None
        return min(max(found.position, start), end)

    def read(
        self, start: int, end: int, interest: Projection, on_loss: LossHandler
    ) -> Generator[MessageBatch]:
        position, trial, topics = start, self._attempt(), _pulled(interest)
        while position < end and not interest.is_nothing:
            call = self._call(position, PullRange(end), trial, topics)
            feed = RangeStream(call.start, position, end, interest, is_filtered=bool(topics))
            try:
                if call.start.first >= end:
                    on_loss(SkipForward(position, end, "trimmed"))
                    return
                while not feed.is_done:
                    found, error = self._next_found(call, feed)
                    for each in found:
                        if isinstance(each, MessageBatch):
                            yield each
                        else:
                            on_loss(each)
                    if feed.position > position:
                        position = feed.position
                        trial.record_success()
                    if error is not None:
                        self._leave(error, trial)
                        break
            finally:
                self._loop.finish(call.end())

    def hold(self, name: str, position: int) -> None:
        """`rt.CertificateError` unless the certificate has that name.

        Returns once the cluster has a hold of that name. Without a majority it returns after seconds, and the
        node proposes the hold when there is a majority. If the node is left, the next node receives the
        position as well.
        """
        self._held, self._told_node = Acknowledged(name, position), None
        with contextlib.suppress(NothingMergedYet):  # The node has received it all the same.
            self._ask("earliest", PullRange(0))

    def close(self) -> None:
        if self._loop.is_running:
            self._loop.finish(self._nodes.close())
            self._loop.close()

    def interrupt(self) -> None:
        self._loop.interrupt()

    # Calls

    def _newest(self) -> PullStart:
        """The answer of a node whose log reaches the end that is known so far. The first time, it is the
        answer with the latest end from a majority.

        A wiped node has little of the log until it has copied it. If fewer than a majority answer, the answer
        with the latest end counts, and that is logged.
        """
        answers: list[tuple[PullStart, str]] = []
        while True:
            start, _ = self._ask("earliest", PullRange(0))
            nodes = self._nodes.count
            wanted = 1 if self._end else nodes // 2 + 1
            is_again = self._nodes.target in (target for _, target in answers)
            if is_again and len(answers) < wanted:
                logger.warning("no_majority_reachable answers=%d nodes=%d", len(answers), nodes)
            answers.append((start, self._nodes.target))
            start, target = max(answers, key=lambda answer: answer[0].end)
            if is_again or len(answers) >= nodes or (len(answers) >= wanted and start.end >= self._end):
                self._nodes.target, self._end = target, max(self._end, start.end)
                return start
            self._nodes.advance()

    def _ask(
        self, position: Wanted, wanted: PullRange, *, least_end: int = 0
    ) -> tuple[PullStart, list[Waypoint]]:
        """The answer of a node to a request for no bytes: its start, and an outline if that was requested.

        The node's log must reach `least_end`.
        """
        trial = self._attempt()
        while True:
            call = self._call(position, wanted, trial)
            waypoints: list[Waypoint] = []
            try:
                check_found(position, call.start)
                if call.start.end < least_end:
                    raise Unreachable("this node has less of the log", got=call.start.end, expected=least_end)
                while (item := self._loop.run(call.next_item())) is not None:
                    if not isinstance(item, LogOutline):
                        raise ProtocolViolation(
                            "the node sent bytes that were not requested", where=call.target
                        )
                    waypoints += item.waypoints
                return call.start, waypoints
            except RtError as error:
                self._leave(error, trial)
            finally:
                self._loop.finish(call.end())

    def _next_found(self, call: NodeCall, feed: RangeStream) -> tuple[list[Found], RtError | None]:
        """The messages of the next item, and the error that followed."""
        found: list[Found] = []
        try:
            item = self._loop.run(call.next_item())
            if item is None:
                raise Unreachable("the node ended the stream", where=call.target)
            if isinstance(item, PullStart | LogOutline):
                raise ProtocolViolation("the node sent a message that was not requested", where=call.target)
            if isinstance(item, Chunk):
                self.received_bytes += len(item.data)
            found.extend(feed.handle(item))
        except RtError as error:
            return found, error
        return found, None

    def _call(
        self, position: Wanted, wanted: PullRange, trial: _Attempt, topics: tuple[str, ...] = ()
    ) -> NodeCall:
        """A call that a node has answered. Raises when all have failed for long enough."""
        while True:
            target = self._nodes.target
            held = None if target == self._told_node else self._held
            merged = PullMerged(position=position, topics=topics, acknowledged=held, range=wanted)
            silence_seconds = SILENCE_SECONDS if self._has_answered else trial.share_seconds()
            try:
                call = self._loop.run(self._open(PullHello(self._stream, merged), silence_seconds))
            except Diverged:  # All nodes will follow this one.
                raise
            except RtError as error:
                self._leave(error, trial)
            else:
                self._told_node = target
                self._record_answer(trial)
                return call

    async def _open(self, hello: PullHello, silence_seconds: float) -> NodeCall:
        call = await NodeCall.open(self._nodes.channel(), hello, silence_seconds)
        try:
            self._known_log.check(call.start)
            self._nodes.record_answer(call.start, self._failures)
        except RtError:
            await call.end()
            raise
        return call

    def _leave(self, error: RtError, trial: _Attempt) -> None:
        """Go on to the next node after a pause. Raise if another attempt is of no use any more."""
        self._loop.require_open()  # After `interrupt` or in a forked child, no node has failed.
        if isinstance(error, MembersChanged) and self._nodes.is_renewal():
            return
        target = self._nodes.target
        if isinstance(error, NothingMergedYet):
            self._record_answer(trial)
            level = logging.DEBUG
        else:
            level = logging.DEBUG if target in self._failures else logging.WARNING
            self._failures[target] = error
        logger.log(level, "node_left endpoint=%s error=%r", target, str(error))
        try:
            pause = trial.record_failure(error)
        except RtError as last:
            if self._has_answered or isinstance(last, _REFUSALS):
                raise
            targets = self._nodes.targets
            within, probe = self._connect_seconds, _PROBE_SHARE * self._connect_seconds
            raise self._loop.run(
                explain_silence(
                    targets,
                    self._stream,
                    self._tls,
                    self._failures,
                    within_seconds=within,
                    probe_seconds=probe,
                )
            ) from last
        self._nodes.record_failure()
        self._nodes.advance()
        self._loop.run(self._nodes.close_unused())
        self._loop.wait(pause)

    def _attempt(self) -> _Attempt:
        if self._has_answered:
            return _Attempt(self._patience_seconds, self._nodes)
        patience_seconds = (1 - _PROBE_SHARE) * self._connect_seconds
        return _Attempt(patience_seconds, self._nodes, is_first=True)

    def _record_answer(self, trial: _Attempt) -> None:
        """The node that is asked has answered."""
        self._failures.pop(self._nodes.target, None)
        self._has_answered = True
        trial.patience_seconds = self._patience_seconds


class _Attempt:
    """When to stop trying: after `patience_seconds` without success, or when every node has refused, or said
    that the log is empty.
    """

    def __init__(self, patience_seconds: float, nodes: NodeChannels, *, is_first: bool = False) -> None:
        self.patience_seconds = patience_seconds
        self._started = time.monotonic()
        self._nodes = nodes
        self._failing_since = self._started if is_first else None
        self._failures = 0
        self._refusals = 0
        self._empties = 0
        self._failure: RtError | None = None
        """The error to raise: the last error of a node with messages, if there is any."""

    def share_seconds(self) -> float:
        """How many seconds the next node may be silent so that each node can be asked in time."""
        left = self._started + self.patience_seconds - time.monotonic()
        return min(
            SILENCE_SECONDS,
            max(left, 0.0) / max(len(self._nodes.targets) - self._failures, 1) + _TURN_SECONDS_MIN,
        )

    def record_success(self) -> None:
        self._failing_since = self._failure = None
        self._failures = self._refusals = self._empties = 0

    def record_failure(self, error: RtError) -> float:
        """How many seconds to wait before the next node is asked. Raises `error` to stop."""
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        self._failures += 1
        self._refusals = self._refusals + 1 if isinstance(error, _REFUSALS) else 0
        self._empties = self._empties + 1 if isinstance(error, NothingMergedYet) else 0
        if self._failure is None or not isinstance(error, NothingMergedYet):
            self._failure = error
        nodes = len(self._nodes.targets)
        if max(self._refusals, self._empties) >= nodes:
            raise error
        if now - self._failing_since >= self.patience_seconds:
            raise self._failure
        rounds = (self._failures - 1) // nodes
        left = self._failing_since + self.patience_seconds - now
        return 0.0 if not rounds else min(_PAUSE_SECONDS_MAX, 0.05 * 2 ** min(rounds, 6), left)


def _pulled(interest: Projection) -> tuple[str, ...]:
    """The topics that a node filters by. Empty: there is no filter, or it is too large for a node."""
    topics = interest.topics
    if topics is None:
        return ()
    try:
        found = topics if isinstance(topics, TopicPatterns) else TopicPatterns.named(topics)
        return check_wanted(found.patterns).patterns
    except InvalidOption:
        return ()
