"""What `rt push` and `rt pull` share: how a signal ends them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Final

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


def on_signals(stop: Callable[[int], None]) -> None:
    """Make the running event loop call `stop` with each SIGINT and SIGTERM that is not ignored."""
    for number in _STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
