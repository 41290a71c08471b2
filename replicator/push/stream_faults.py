"""Errors that end a push stream: which of several errors counts, and when the stream is tried again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from rt.errors import (
    CertificateError,
    ClusterMismatch,
    Diverged,
    Fenced,
    FormatError,
    InvalidMessage,
    InvalidName,
    ProtocolViolation,
    RtError,
    TooManyFiles,
)
from rt.net.connect_probe import probe_endpoint
from rt.net.grpc_errors import Unreachable
from rt.net.tls import TLS

_T = TypeVar("_T")

REFUSALS: Final = (Fenced, ClusterMismatch, CertificateError, InvalidName)
"""Rejections that no retry changes. One node may be configured wrongly, so it is asked again until all nodes
reject the session, or until enough nodes report that the session is fenced.
"""
BLOCKING: Final = (ProtocolViolation, FormatError, InvalidMessage, Diverged)
"""Errors that end a stream. If the sent bytes are the cause, they end the next stream too. So it is a
rejection if such an error ends a second stream at the same offset.
"""
CALL_END_SECONDS: Final = 1.0
"""How long the status of a call may take after the call has ended."""
PROBE_AGAIN_SECONDS: Final = 5.0
"""How often to find out why a node cannot be reached."""
BACKOFF_SECONDS_MIN: Final = 0.05
BACKOFF_SECONDS_MAX: Final = 1.0


class LocalLogFailed(Exception):
    """The local log cannot be read; `error` says why."""

    def __init__(self, error: RtError) -> None:
        super().__init__(str(error))
        self.error = error


def read_own_log(read: Callable[[], _T]) -> _T:
    """Return the result of `read`. An error in it ends the pushing, except `Diverged` (the node named a wrong
    offset) and `TooManyFiles`.
    """
    try:
        return read()
    except (Diverged, TooManyFiles):  # Not a fault of the log.
        raise
    except RtError as error:
        raise LocalLogFailed(error) from error


async def first_of(reading: Coroutine[Any, Any, None], writing: Coroutine[Any, Any, None]) -> None:
    """Run both directions until the stream ends, and raise the reason. A reason that the node reports is
    better.
    """
    reader, writer = asyncio.create_task(reading), asyncio.create_task(writing)
    try:
        await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        if not reader.done() and not isinstance(writer.exception(), LocalLogFailed | RtError):
            # The call is over: its status says why.
            await asyncio.wait((reader,), timeout=CALL_END_SECONDS)
    finally:
        reader.cancel()
        writer.cancel()
        ends = await asyncio.gather(reader, writer, return_exceptions=True)
    for end in ends[::-1]:
        if isinstance(end, LocalLogFailed | RtError):
            raise end
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, asyncio.InvalidStateError):
            raise end
    raise Unreachable("the stream ended")


class RetryPause:
    """The pauses between the streams to one endpoint. They double after each failure, up to a maximum.

    They have jitter, so that streams do not reconnect all at once.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._shortened = asyncio.Event()

    def shorten(self) -> None:
        """Make the current pause, or the next one, as short as after a first failure. Pauses double from
        there.
        """
        self._shortened.set()

    async def wait(self) -> bool:
        """Wait after a failure. Returns whether the pause was shortened."""
        self.failures += 1
        longest = min(BACKOFF_SECONDS_MIN * 2 ** min(self.failures - 1, 10), BACKOFF_SECONDS_MAX)
        try:
            async with asyncio.timeout(random.uniform(longest / 2, longest)):
                await self._shortened.wait()
        except TimeoutError:
            return False
        self._shortened.clear()
        self.failures = 1
        await asyncio.sleep(random.uniform(BACKOFF_SECONDS_MIN / 2, BACKOFF_SECONDS_MIN))
        return True


class FailureReason:
    """Why a node cannot be reached, for one stream: gRPC reports only that it failed to connect."""

    def __init__(self, target: str, tls: TLS | None) -> None:
        self._target, self._tls = target, tls
        self._probe_at = 0.0
        self._is_refused_once = False

    def reset(self) -> None:
        """The node was reached."""
        self._is_refused_once = False
        self._probe_at = 0.0

    async def find(self, error: RtError, last: RtError | None) -> RtError:
        """A more precise reason than `error`, if the node could not be reached. `last` is the previous
        reason.

        A certificate counts as refused only after a second refusal in the handshake: a node that stops may
        end a connection at the same moment.
        """
        now = asyncio.get_running_loop().time()
        if not isinstance(error, Unreachable) or self._tls is None:
            return error
        if now < self._probe_at:
            return error if last is None else last
        reason = await probe_endpoint(self._target, self._tls)
        is_refused = isinstance(reason, CertificateError)
        if is_refused and not self._is_refused_once:
            self._is_refused_once = True
            return error
        self._is_refused_once = is_refused
        self._probe_at = now + PROBE_AGAIN_SECONDS
        return error if reason is None else reason
