"""Reports the state of this process to systemd: a datagram to the socket in $NOTIFY_SOCKET, see sd_notify(3).

Nothing here blocks or fails. Without systemd nothing is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Mapping
from typing import Any, Final

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
WATCHDOG: Final = "WATCHDOG=1"
_SHARE: Final = 4
"""Number of messages in the time that the watchdog allows for one message, so that a few may be late."""


class ServiceNotifier:
    """Sends to the service manager that `environment` names, if it names one. For one thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name
        """Empty: there is no service manager, or it has no Unix socket."""
        if not name.startswith(("@", "/")):
            self._address = ""
        self.watchdog_s: Final = _watchdog_s(environment) / _SHARE
        """Seconds between messages to the watchdog; 0: there is none."""

    def send(self, *fields: str) -> bool:
        """Send fields, such as `READY`. False if they were not accepted and should be sent again."""
        if not self._address:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.sendto("\n".join(fields).encode(), socket.MSG_DONTWAIT, self._address)
        except OSError:
            return False
        return True


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """The time that the watchdog allows between two messages; 0: there is no watchdog for this process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    return int(microseconds) / 1e6


async def run_as_service(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` and report to systemd: ready now, alive while the event loop runs, stopping at the end."""
    notifier = ServiceNotifier(os.environ)
    watching = asyncio.ensure_future(_keep_notifying(notifier))
    try:
        await work
    finally:
        watching.cancel()
        notifier.send(STOPPING)


async def _keep_notifying(notifier: ServiceNotifier) -> None:
    while not notifier.send(READY):
        await asyncio.sleep(1.0)
    while notifier.watchdog_s:
        notifier.send(WATCHDOG)
        await asyncio.sleep(notifier.watchdog_s)
