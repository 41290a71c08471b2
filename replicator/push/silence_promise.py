"""Takes a publisher's promise (`max_silence`), and the promise's end, from its directory to the cluster.

For one event loop. The file `.max-silence` holds the last promise of the publisher: see
`rt.sidecar.silence_file`. Each stream states the promise to its node until one node answers that the promise
is committed, or that its run is over. If the file was removed after the promise was stated, by this client or
an earlier one, the publisher was closed in order. The client ends only after a node has answered the end of
the promise: otherwise the cluster would wait for a publisher that has ended.
"""

from __future__ import annotations

import logging

from replicator.protocol.handshake import PushStart, SilenceLimit
from rt.errors import RtError
from rt.log.disk import Disk
from rt.sidecar.silence_file import read_silence_limit

logger = logging.getLogger("replicator")


class SilencePromise:
    """The promise of the session in `path`, as its streams share it."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        self._stated: SilenceLimit | None = None
        """The limit that was stated last to a node, by this client or an earlier one."""
        self._settled: SilenceLimit | None = None
        self._is_supported = False
        self._warned = ""

    def on_start(self, start: PushStart) -> None:
        """Handle that a node accepted the session, and reports the committed limit."""
        limit = start.silence_limit
        if limit is None:
            return
        self._is_supported = True
        if limit != self._settled:
            self._settled = None  # A forced reset may have lost it.
        # Another node may be behind, and know only of an earlier run.
        if limit.milliseconds and (self._stated is None or limit.run > self._stated.run):
            self._stated = limit

    def state(self) -> SilenceLimit | None:
        """The limit to state to a node now; None if there is nothing to state, or a node has answered it."""
        self._stated = self._unsettled() or self._stated
        return self._unsettled()

    def settle(self, limit: SilenceLimit) -> None:
        """Record that a node answered `limit`."""
        self._settled = limit

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to state, or no node can receive it."""
        return not self._is_supported or self._unsettled() is None

    def _unsettled(self) -> SilenceLimit | None:
        try:
            written = read_silence_limit(self._disk, self._path)
        except RtError as error:
            if str(error) != self._warned:
                self._warned = str(error)
                logger.warning("silence_limit_not_read path=%s reason=%s", self._path, error)
            return None
        if written is not None:
            limit = SilenceLimit(*written)
        elif self._stated is not None:
            limit = SilenceLimit(self._stated.run, 0)
        else:
            return None
        return None if limit == self._settled else limit
