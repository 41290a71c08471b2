"""Servers of other systems as child processes.

Invariant: no server outlives `Programs`, nor the process that holds it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NoReturn, Self, TypeVar

from rt.child_process import ChildProcess, listen
from rt.errors import Timeout
from sequencer.localcluster.nodes import listens
from sequencer.localcluster.processes import ProcessEnded

T = TypeVar("T")

_WAIT_S: Final = 60.0
_POLL_S: Final = 0.02
_LOG_TAIL_BYTES: Final = 2000
_MODULE: Final = "sequencer.bench.compare.programs"


class Programs:
    """Started programs. Each logs to `<root>/<name>.log`. Leaving it kills them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._running: dict[str, ChildProcess] = {}
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._held:
            for process in self._running.values():
                process.kill()

    def hold(self, servers: AbstractContextManager[T]) -> T:
        """Enter a context manager. It is left together with this one."""
        return self._held.enter_context(servers)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Start a program under a name of its own. Returns the id of its parent process."""
        with self._log(name).open("ab") as log:
            self._running[name] = ChildProcess(
                [sys.executable, "-P", "-m", _MODULE, *command],
                env={**os.environ, **(environment or {})},
                stdout=log,
                stderr=log,
            )
        return self._running[name].pid

    def wait_listening(self, ports: Sequence[int]) -> None:
        """Wait until all ports are listened on. `ProcessEnded` if a program ended; `rt.Timeout` if it takes
        too long.
        """
        deadline = time.monotonic() + _WAIT_S
        while missing := [port for port in ports if not listens(port)]:
            self.check_alive()
            if time.monotonic() > deadline:
                raise Timeout(
                    "servers do not listen in time",
                    where=f"port {', '.join(map(str, missing))}",
                    got=self._log_tails(),
                    expected=f"within {_WAIT_S:g} s",
                )
            time.sleep(_POLL_S)

    def check_alive(self) -> None:
        """Raise `ProcessEnded` if a program has ended."""
        for name, process in self._running.items():
            if process.status is not None:
                got = f"status {process.status}: {self._log_tail(name)}"
                raise ProcessEnded("a program ended by itself", where=name, got=got)

    def _log(self, name: str) -> Path:
        return self._root / f"{name}.log"

    def _log_tail(self, name: str) -> str:
        """The end of a program's log."""
        return self._log(name).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def _log_tails(self) -> str:
        return "\n".join(f"{name}: {self._log_tail(name)}" for name in self._running)


def version_of(command: Sequence[str]) -> str:
    """The first number with dots that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"\d+(?:\.\d+)+", done.stdout + done.stderr)
    return found[0] if found else "unknown"


def main() -> NoReturn:
    """Run a program in the process group of this process. The group is killed when stdin ends."""
    listen(lambda _: None, lambda: os.killpg(0, signal.SIGKILL))
    sys.exit(subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, check=False).returncode)


if __name__ == "__main__":
    main()
