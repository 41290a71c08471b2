"""The push client of one session directory: a stream to each node, and the progress of all together.

Invariants:
- A node that is slow, unreachable or wrong does not affect the others.
- Once the members have changed, the client also pushes to the nodes in their list, and counts only members.
- The client goes on until all nodes refuse the session for good, the local log cannot be read, the directory
  was removed, or the publisher has ended and a majority has everything.
- Only one client serves a directory, because of a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial

from replicator.protocol.handshake import NOWHERE, STATUS_SECONDS
from replicator.push.lock import is_awaited, lock_push, wait_for_turn
from replicator.push.problem_log import ProblemLog, PushReport
from replicator.push.session_source import SessionSource
from replicator.push.stall_detector import StallDetector
from replicator.push.stream import PushStream
from replicator.push.stream_faults import LocalLogFailed
from replicator.push.stream_set import PushStreams
from replicator.send.directory_watch import WatchedDirectory, WatchHub
from rt.endpoints import check_endpoints
from rt.errors import Fenced, LogNotFound, RtError
from rt.log.disk import REAL, Disk, Lock
from rt.net.grpc_channel import check_target, open_channel
from rt.net.tls import TLS
from rt.sidecar.progress_file import PushState
from rt.sidecar.protocol import SERVING_FILE, EndpointStatus

logger = logging.getLogger("replicator")

_LOOK_AROUND_SECONDS = 0.2
"""How often a client whose publisher has ended checks whether another client waits for the directory."""
_LOOK_FOR_DIRECTORY_SECONDS = 30.0
"""How often a client checks that its directory still exists, if nothing happens in it."""


class PushClient:
    """Pushes the session in `directory` to the nodes at `endpoints` ("host:port" each), by `run`.

    Without `tls` the endpoints must be on loopback, and `insecure` set. `waits`: wait for another client that
    serves the directory, rather than raise `rt.DirectoryLocked`. Clients of one loop may share `hub`.
    `on_report` is called with `report` when it changes. `problems` is one log for all clients that serve the
    directory one after the other.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        stream: str,
        endpoints: Sequence[str],
        tls: TLS | None = None,
        *,
        insecure: bool = False,
        waits: bool = False,
        on_report: Callable[[PushReport], None] = lambda _: None,
        problems: ProblemLog | None = None,
        hub: WatchHub | None = None,
        disk: Disk = REAL,
    ) -> None:
        self.directory = os.path.abspath(os.fspath(directory))
        self._stream = stream
        self._endpoints = check_endpoints(endpoints, is_required=True)
        for endpoint in self._endpoints:
            check_target(endpoint, tls, insecure=insecure)
        self._tls = tls
        self._insecure = insecure
        self._waits = waits
        self._on_report = on_report
        self._last_report = PushReport(None, ())
        self._problems = ProblemLog(self.directory) if problems is None else problems
        self._hub = WatchHub() if hub is None else hub
        self._disk = disk
        self._source: SessionSource | None = None
        self._streams: PushStreams | None = None
        self._is_finishing = False
        self._stall = StallDetector()

    @property
    def is_drained(self) -> bool:
        """Whether a majority of the nodes has synced everything that the last poll found."""
        if self._source is None:
            return False
        quorum = self._source.quorum
        streams = self._streams.all if self._streams is not None else []
        drained = {stream.node for stream in streams if stream.node is not None and stream.is_drained}
        return sum(map(quorum.known.has_member, drained)) >= quorum.majority

    @property
    def report(self) -> PushReport:
        """The connection to each node, and what blocks the session."""
        endpoints = [EndpointStatus(one.target, one.is_serving, one.failure) for one in self._counted]
        members = 0 if self._streams is None else self._streams.members
        return PushReport(self._blocking(), tuple(endpoints), members)

    @property
    def _counted(self) -> list[PushStream]:
        return [] if self._streams is None else self._streams.counted

    @property
    def _nodes(self) -> int:
        """How many nodes there are, as far as is known."""
        return 0 if self._streams is None else self._streams.members or len(self._streams.all)

    @property
    def stuck(self) -> str:
        """Why nothing was merged for `STALLED_SECONDS` although bytes wait. Empty if something was merged, or
        no bytes wait.
        """
        if not self._stall.is_stuck:
            return ""
        waits = f"{self._stall.status.waiting_bytes:,} bytes have waited for {self._stall.stalled_s:.0f} s"
        if self.is_drained:
            return f"{waits}: a majority has synced them, and they are not merged; see `rt status`"
        return f"{waits}: {self.report.reasons or 'no majority has synced them; see `rt status`'}"

    def finish(self) -> None:
        """Call it when the publisher has ended. `run` then returns when everything that is there now is
        replicated.
        """
        self._is_finishing = True
        if self._source is not None:
            self._source.wake(is_last=True)
            self._source.progressed.set()

    async def run(self) -> None:
        """Push the session. Returns after `finish`; otherwise raises the error that ended the push."""
        with contextlib.ExitStack() as opened:
            lock = (
                await wait_for_turn(self.directory, disk=self._disk)
                if self._waits
                else lock_push(self.directory, disk=self._disk)
            )
            opened.callback(lock.close)
            watched = opened.enter_context(self._hub.watching(self.directory))
            self._source = log = SessionSource(
                self.directory,
                self._stream,
                listen=lambda to_writes: self._hub.listen(watched, to_writes=to_writes),
                disk=self._disk,
            )
            opened.callback(log.close)
            if self._is_finishing:
                log.wake(is_last=True)
            await self._run(log, watched, lock)

    async def _run(self, log: SessionSource, watched: WatchedDirectory, lock: Lock) -> None:
        tasks: list[asyncio.Task[None]] = []
        connect = partial(open_channel, tls=self._tls, insecure=self._insecure)
        streams = self._streams = PushStreams(log, self._endpoints, connect, self._tls, self._report)
        try:
            streams.open()
            tasks.append(asyncio.create_task(self._wait_until_done(log, lock)))
            tasks.append(asyncio.create_task(self._watch_directory(log, watched, lock)))
            tasks.append(asyncio.create_task(self._watch_progress(log)))
            tasks.append(asyncio.create_task(streams.run()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        except LogNotFound:
            self._raise_if_removed(lock)
            raise
        except LocalLogFailed as failed:
            self._raise_if_removed(lock)
            logger.error("local_log_failed path=%s reason=%s", self.directory, failed.error)
            raise failed.error from failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await streams.close()

    async def _wait_until_done(self, log: SessionSource, lock: Lock) -> None:
        while True:
            log.progressed.clear()
            self._raise_if_refused(log)
            if self._is_finishing and self.is_drained and log.silence.is_settled:
                return
            try:
                async with asyncio.timeout(_LOOK_AROUND_SECONDS if self._is_finishing else None):
                    await log.progressed.wait()
            except TimeoutError:
                self._raise_if_removed(lock)
                if is_awaited(self.directory, disk=self._disk):
                    return

    async def _watch_directory(self, log: SessionSource, watched: WatchedDirectory, lock: Lock) -> None:
        """Wake the streams when the directory changes. `rt.LogNotFound` when it was removed."""
        while True:
            version = watched.version
            self._raise_if_removed(lock)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_FOR_DIRECTORY_SECONDS):
                    await watched.changed(version)
                    log.wake()

    async def _watch_progress(self, log: SessionSource) -> None:
        while True:
            starts = sorted((stream.start for stream in self._counted), reverse=True)
            # If a session is completely merged, nodes may report only the offset at which it continues.
            of_majority = starts[self._nodes // 2] if self._nodes // 2 < len(starts) else NOWHERE
            reached = max(log.quorum.merged_offset, of_majority)
            self._stall.update(asyncio.get_running_loop().time(), reached, log.bytes_after(reached))
            await asyncio.sleep(STATUS_SECONDS)

    def _raise_if_removed(self, lock: Lock) -> None:
        """Bytes that were not sent are lost with the directory, so waiting is of no use."""
        path = os.path.join(self.directory, SERVING_FILE)
        if lock.is_linked() and self._disk.size(path) is not None:
            return
        error = LogNotFound(
            "the session's directory was removed while it was pushed",
            where=self.directory,
            hint="What was not replicated is lost. Open the publisher again: it makes a new directory.",
        )
        logger.error("session_directory_removed path=%s", self.directory)
        raise error

    def _report(self) -> None:
        report = self.report
        if str(report) != str(self._last_report):  # Compared as text: each attempt has its own error object.
            self._last_report = report
            self._on_report(report)
        # A node with a full disk accepts the session again and again, and ends it at the first bytes.
        if report.reasons or all(stream.is_accepting for stream in self._counted):
            self._problems.record_report(report)

    def _raise_if_refused(self, log: SessionSource) -> None:
        """End if enough nodes fence the session, or if all refuse it and no publisher is open.

        While a publisher is open, the streams ask again: the cause counts as one problem until it is fixed.
        """
        error = self._blocking()
        is_fenced = isinstance(error, Fenced)
        waits = self._waits and not self._is_finishing
        may_recover = waits or not all(one.refused for one in self._counted)
        if error is None or (may_recover and not is_fenced):
            return
        log.give_up(PushState.FENCED if is_fenced else PushState.REFUSED)
        raise error

    def _blocking(self) -> RtError | None:
        """The error because of which no byte of the session can be replicated until its cause is fixed; None
        if bytes can be replicated.

        There is such an error if a majority refuses the session and no other node accepts its bytes. The
        other nodes alone could not replicate it. There is also such an error if enough of the nodes fence the
        session.
        """
        streams, nodes = self._counted, self._nodes
        refusals = [stream.refused for stream in streams if stream.refused is not None]
        fenced = [error for error in refusals if isinstance(error, Fenced)]
        if not refusals:
            return None
        serving = sum(stream.is_serving for stream in streams)
        if _is_fenced(len(fenced), serving, nodes) or (fenced and len(refusals) >= nodes):
            return fenced[0]
        is_accepted = any(stream.is_accepting for stream in streams)
        return refusals[0] if 2 * len(refusals) > nodes and not is_accepted else None


def _is_fenced(fenced: int, serving: int, nodes: int) -> bool:
    """Whether `fenced` of the `nodes` are enough to believe that the session is fenced.

    A majority is enough. Half of the nodes is enough if no other node accepts the session now. Otherwise a
    publisher with two nodes, one of them unreachable, would never learn that it is fenced.
    """
    return 2 * fenced > nodes or (2 * fenced == nodes and not serving)
