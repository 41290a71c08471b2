"""Clean stops: SIGINT and SIGTERM end a command between two units of work.

Invariants:
- A signal is recorded at once, and raised only inside `waiting` or at the next entry of it. So the work
  between two waits is always completed.
- A second signal of the same kind has its usual effect.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

from rt.child_process import listen

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The command was stopped by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number


class Interrupts:
    """Handles the signals that are not ignored, for a `with` block; only in the main thread."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._is_waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) or signal.SIG_DFL for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A block that a signal may end with `Interrupted` at any point."""
        self._is_waiting = True
        try:
            if self._number is not None:
                raise Interrupted(self._number)
            yield
        finally:
            self._is_waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._number = number
        signal.signal(number, self._before[number])
        if self._is_waiting:
            raise Interrupted(number)


async def run_until_signal(
    work: Coroutine[Any, Any, None], *, listen: Callable[[Callable[[int], None]], None] | None = None
) -> None:
    """Run `work`. A signal that is not ignored cancels it, and `Interrupted` is raised after `work` has
    ended.

    `listen` is called with a function that has the effect of a signal.
    """
    import asyncio

    running = asyncio.ensure_future(work)
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        running.cancel()

    for number in _STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
    if listen is not None:
        listen(stop)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
        raise Interrupted(stopped[0]) from None


def listen_in_loop(on_line: Callable[[bytes], object], on_end: Callable[[], object]) -> None:
    """In the running event loop: call `on_line` with each line of stdin, and then `on_end`."""
    import asyncio

    loop = asyncio.get_running_loop()

    def call(act: Callable[..., object], *arguments: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(act, *arguments)

    listen(partial(call, on_line), partial(call, on_end))
