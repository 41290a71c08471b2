"""Runs the child processes of a node: starts them, waits for their ends and for signals, stops them.

While a child hangs, `node_watch` reports that. Nothing is done about it here: a disk may be slow.

Invariants:
- No child outlives its `Supervisor`. A child gets its settings on its stdin. The end of stdin shows that the
  parent has ended. The kernel also kills the child when the parent dies.
- Arguments and environment contain no secrets. All waiting is in one place. `config.restart_policy` decides.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rt.child_process import ChildProcess
from rt.errors import StorageError
from rt.log.disk import REAL, Lock, storage_errors
from rt.sidecar.systemd_notify import ServiceNotifier
from sequencer.config.config import NodeConfig
from sequencer.config.restart_policy import (
    FINAL,
    Action,
    ExitStatus,
    RestartPolicy,
    RestartTimes,
    SignalChild,
    StartChild,
)
from sequencer.node.health_port import open_health_port
from sequencer.node.node_watch import TICK_S, NodeWatch
from sequencer.node.startup_check import may_write, unwritable

# In the order in which they are started. They stop in reverse order.
COMMANDS: Final[Mapping[str, Sequence[str]]] = {
    # -P: do not import modules from the working directory.
    role: (sys.executable, "-P", "-m", "sequencer.node.child_main", role)
    for role in ("control", "data")
}
DIVERGED_HINT: Final = (
    "This replica differs from the others. Keep its directory for analysis. If only this node says this, "
    "start it with an empty directory: it rejoins. If more than one node says this, empty none."
)

logger = logging.getLogger("sequencer.node.supervisor")


class Supervisor:
    """Runs `commands`, a command for each child, in order. Each child reads `handover`, one line, on its
    stdin.

    The numbers of the descriptors that a child inherits follow its command. The stdin of a child is a socket.
    Lines that the child writes to it are heartbeats. The caller must close `watch`.

    `run` must run on the main thread: it handles SIGTERM and SIGINT, and ignores SIGHUP.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        handover: str,
        *,
        times: RestartTimes | None = None,
        watch: NodeWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert "\n" not in handover, "one line"
        self._commands, self._handover, self._clock = commands, handover.encode() + b"\n", clock
        self._policy = RestartPolicy(tuple(commands), times or RestartTimes())
        self._watch = watch or NodeWatch(tuple(commands))
        self._running: dict[str, ChildProcess] = {}
        self._signal_read, self._signal_write = -1, -1

    def run(self) -> ExitStatus:
        """Supervise until a signal or a child ends it. Returns when no child runs."""
        with self._signals(), self._no_survivors():
            self._do(self._policy.start(self._clock()))
            while (result := self._policy.result) is None:
                self._wait()
                self._do(self._policy.tick(self._clock()))
        logger.info("node_stopped status=%d", result)
        return result

    def _wait(self) -> None:
        """Handle one round of events. Returns also when a timer is due."""
        poll = select.poll()
        poll.register(self._signal_read, select.POLLIN)
        for child in self._running.values():
            child.register(poll)
        now_s = self._clock()
        self._watch.register(poll, now_s)
        wake_at_s = self._policy.wake_at_s
        wait_s = TICK_S if wake_at_s is None else min(TICK_S, max(0.0, wake_at_s - now_s))
        poll.poll(wait_s * 1000 + 1)  # One more ms: poll may return slightly too early for the clock.
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._signal_read, 64):
                logger.info("node_stopping signal=%s", signal.Signals(number).name)
                self._do(self._policy.stop(self._clock()))
        for name, child in list(self._running.items()):
            if child.exchange():
                self._watch.heard(name)
            if child.status is not None:
                self._on_ended(name)
        if self._policy.is_stopping:
            self._watch.stopping()
        self._watch.tick(self._clock())

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartChild(child):
                    self._start(child)
                case SignalChild(child, number):
                    level = logging.WARNING if number == signal.SIGKILL else logging.INFO
                    logger.log(level, "child_signalled child=%s signal=%s", child, number.name)
                    self._running[child].signal(number)

    def _start(self, child: str) -> None:
        fds = self._watch.inherited(child)
        try:
            process = ChildProcess([*self._commands[child], *map(str, fds)], stdout=None, pass_fds=fds)
        except OSError as error:
            logger.error("child_not_started child=%s error=%r", child, str(error))
            self._decide_on(child, ExitStatus.FELL)
            return
        self._running[child] = process
        self._watch.started(child, process.pid)
        logger.info("child_started child=%s pid=%d", child, process.pid)
        process.send(self._handover)

    def _on_ended(self, child: str) -> None:
        status = self._running.pop(child).kill()
        self._watch.ended(child)
        how = f"status={status}" if status >= 0 else f"signal={_signal_name(-status)}"
        level = logging.INFO if self._policy.is_stopping else logging.WARNING
        logger.log(level, "child_ended child=%s %s", child, how)
        self._decide_on(child, status)

    def _decide_on(self, child: str, status: int) -> None:
        now_s = self._clock()
        is_new = not self._policy.is_stopping
        actions = self._policy.ended(child, status, now_s)
        if status == ExitStatus.DIVERGED:
            logger.critical("node_diverged child=%s hint=%r", child, DIVERGED_HINT)
        elif is_new and status in FINAL:
            logger.critical(
                "node_failed child=%s status=%d hint=%r", child, status, "Its last lines say why."
            )
        elif is_new and (wake_at_s := self._policy.restart_at_s(child)) is not None:
            logger.info("child_restart_scheduled child=%s pause_s=%.1f", child, wake_at_s - now_s)
        self._do(actions)

    @contextlib.contextmanager
    def _no_survivors(self) -> Iterator[None]:
        try:
            yield
        finally:
            for child in self._running.values():
                child.kill()
            self._running.clear()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        self._signal_read, self._signal_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Python runs handlers between two of its steps. Without this descriptor, a signal just before a wait
        # would be handled only after the wait.
        wakeup_fd = signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)
        before: dict[int, Any] = {signal.SIGTERM: signal.signal(signal.SIGTERM, _on_signal)}
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, _on_signal)
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Children inherit that.
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup_fd)
            os.close(self._signal_read)
            os.close(self._signal_write)


def _on_signal(_number: int, _frame: object) -> None:
    """The interpreter has written the signal's number to the wake-up descriptor."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def lock_directory(config: NodeConfig) -> Lock:
    """Lock the node's directory, which is made if it is missing. Held until closed.

    `rt.DirectoryLocked` if another node runs on it, `rt.StorageError` if it cannot be written.
    """
    try:
        os.makedirs(config.directory, mode=0o700, exist_ok=True)
        with storage_errors(config.lock_file, "locking the node's directory"):
            return REAL.lock(config.lock_file)
    except OSError as error:
        raise unwritable(config.directory, error.strerror) from error
    except StorageError as error:
        if isinstance(error.__cause__, PermissionError) and not may_write(config.directory):
            raise unwritable(config.directory, error.__cause__.strerror) from error
        raise


def supervise(config: NodeConfig) -> ExitStatus:
    """Run the node of a directory that the caller has locked; see `Supervisor.run`."""
    listening = open_health_port(config.listen, config.health_port)
    watch = NodeWatch(tuple(COMMANDS), config.name, listening, ServiceNotifier(os.environ))
    with contextlib.closing(watch):
        return Supervisor(COMMANDS, config.to_json(), watch=watch).run()
