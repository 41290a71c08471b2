"""A cluster of real `rt node` processes on the loopback, with a PKI of its own: for demos, tests, benchmarks.

Invariants:
- When a call returns, its action is done: a killed node and its children have ended.
- No process outlives the `LocalCluster` that started it, nor the process that holds this `LocalCluster`.

Nodes have names ("n1", "n2", ...). Each logs to `<root>/<name>.log` and keeps everything else below
`<root>/<name>`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

from rt.bench.processes import ProcessTable
from rt.child_process import ChildProcess
from rt.errors import LogNotFound, Timeout
from rt.log.check.compare import Comparison, compare
from rt.log.check.status import read_status
from rt.log.disk import storage_errors
from rt.log.scan.directory import merged_directory
from rt.net.dev_pki import issue
from rt.net.identity import Identity, Role
from rt.net.tls import TLS
from sequencer.localcluster.loopback import NodePorts, choose_ports, issued_at, make_certificates
from sequencer.localcluster.node_log import NodeLog
from sequencer.localcluster.processes import ProcessEnded

Part: TypeAlias = Literal["node", "control", "data"]
"""A whole node, or one of its two child processes, which the node restarts."""

WAIT_S: Final = 120.0
_POLL_S: Final = 0.02
_MODULE: Final = "sequencer.localcluster.node_main"
_STOP_S: Final = 60.0
"""A node gives each of its two children 10 s to stop."""


class LocalCluster:
    """A cluster of `stream` with `count` nodes below `root`. The nodes do not run yet.

    `root` must be a short path: the path of a Unix socket in `<root>/<name>` has less than 100 bytes. `flags`
    are passed to each `rt node`. With `with_rest` the nodes serve REST and health on ports of their own.
    `ports`: the ports of each node; default: free ports. The first `begin` nodes (default: all) make the
    cluster. The other nodes know these nodes and themselves, and must be added later.
    """

    def __init__(
        self,
        root: Path,
        count: int = 3,
        *,
        stream: str = "s",
        flags: Sequence[str] = (),
        with_rest: bool = False,
        ports: Mapping[str, NodePorts] | None = None,
        begin: int | None = None,
    ) -> None:
        self.root, self.stream, self._flags = root.absolute(), stream, list(flags)
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.first = self.names[:begin]
        self._pki = self.root / "pki"
        self._issued: dict[Identity, TLS] = {}
        self._issuing = threading.Lock()
        self.root.mkdir(parents=True, exist_ok=True)
        self._certificates = make_certificates(self._pki, stream, self.names)
        self.ports = dict(ports or choose_ports(self.names, with_rest=with_rest))
        self.raft_ports = {name: one.raft for name, one in self.ports.items()}
        self.data_ports = {name: one.data for name, one in self.ports.items()}
        self.rest_ports = {name: one.rest for name, one in self.ports.items() if one.rest}
        self.health_ports = {name: one.health for name, one in self.ports.items() if one.health}
        self._logs = {name: NodeLog(self.root / f"{name}.log") for name in self.names}
        self._running: dict[str, ChildProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill(*self._running)

    @property
    def running(self) -> list[str]:
        """The nodes that were started, and neither stopped nor killed since."""
        return list(self._running)

    @property
    def endpoints(self) -> list[str]:
        """The nodes' addresses for publishers and subscribers."""
        return [f"127.0.0.1:{port}" for port in self.data_ports.values()]

    def certificate(
        self,
        role: Role,
        name: str,
        *,
        dedup_ids: Collection[str] = (),
        lease_groups: Collection[str] = (),
        renew: bool = False,
    ) -> TLS:
        """The certificate of this identity: issued at the first call and with `renew`. Thread-safe.

        The certificate of a node was made with the cluster.
        """
        if role == "node":
            return TLS(*self._certificates[name])
        directory = self._pki / role
        identity = Identity(self.stream, role, name, frozenset(dedup_ids), frozenset(lease_groups))
        with self._issuing:
            if renew or identity not in self._issued:
                directory.mkdir(exist_ok=True)
                # `issue` writes beside the CA, where a certificate of that name may belong to another role.
                paths = issue(self._pki, identity, renew=True, now=issued_at())
                self._issued[identity] = TLS(*(shutil.copy(path, directory) for path in paths))
            return self._issued[identity]

    def directory(self, name: str) -> Path:
        return self.root / name

    def merged_directory(self, name: str) -> Path:
        return Path(merged_directory(self.directory(name), self.stream))

    def merged_position(self, name: str) -> int:
        """One past the last message in a node's merged log; 0 if it is empty."""
        try:
            return read_status(self.merged_directory(name)).end
        except LogNotFound:
            return 0

    def compare(self, *others: Path) -> Comparison:
        """Compare the merged logs of all nodes, and `others`, byte by byte."""
        return compare([*map(self.merged_directory, self.names), *others])

    def leader(self) -> str | None:
        """The leader according to the nodes' logs."""
        for log in self._logs.values():
            log.read()
        last = max(log.term for log in self._logs.values())
        leading = [name for name in self._running if self._logs[name].leads == last]
        return leading[0] if leading and last else None

    def last_words(self, name: str, lines: int = 10) -> str:
        """The end of a node's log."""
        return self._logs[name].last_words(lines)

    # Actions

    def start(self, *names: str) -> None:
        """Start these nodes, or all. Returns before they are ready."""
        for name in names or self.names:
            assert name not in self._running, name
            path = self._logs[name].path
            with storage_errors(str(path), "opening the log of a node"):
                self._logs[name].start()
                log = path.open("ab")
            with log:
                self._running[name] = ChildProcess(
                    [sys.executable, "-P", "-m", _MODULE, "node", *self._arguments(name)],
                    env=self._environment(name),
                    stdout=log,
                    stderr=log,
                )

    def stop(self, *names: str) -> dict[str, int]:
        """Stop these nodes (default: all that run) with SIGTERM at the same time. Returns their exit
        statuses.

        `rt.Timeout` if one does not stop; then it is killed.
        """
        stopping = {name: self._running[name] for name in names or self.running}
        for process in stopping.values():
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for name, process in stopping.items():
            if process.wait(max(0.0, deadline - time.monotonic())) is None:
                self.kill(*(set(stopping) & set(self._running)))
                raise Timeout("a node does not stop", where=name, got=self.last_words(name))
        return {name: self._running.pop(name).kill() for name in stopping}

    def kill(self, *names: str, part: Part = "node") -> None:
        """Kill these nodes, or a part of each, with SIGKILL at nearly the same time. The node restarts a
        killed part.
        """
        with contextlib.ExitStack() as opened:
            pids = [pid for name in names for pid in self.pids(name, part)]
            handles = [fd for pid in pids if (fd := _open_process(pid, opened)) is not None]
            for fd in handles:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            for fd in handles:
                select.select([fd], [], [])
        if part == "node":
            for name in names:
                self._running.pop(name).kill()

    def pause(self, name: str, part: Part = "node") -> None:
        """Send SIGSTOP to a node or a part of it. Its connections stay open."""
        self._signal(name, signal.SIGSTOP, part)

    def resume(self, name: str, part: Part = "node") -> None:
        self._signal(name, signal.SIGCONT, part)

    def wipe(self, name: str) -> None:
        """Delete the directory of a node that does not run."""
        assert name not in self._running, name
        shutil.rmtree(self.directory(name))
        self._logs[name].forget_terms()

    def pids(self, name: str, part: Part = "node") -> list[int]:
        """The process ids of a running node and its children, the node first; or of its process for `part`,
        if that runs.
        """
        node = self._running[name].pid
        children = ProcessTable().children(node)
        return [node, *children] if part == "node" else [pid for pid in children if _role(pid) == part]

    # Waiting

    def wait(
        self,
        is_met: Callable[[], object],
        what: str,
        *,
        timeout_s: float = WAIT_S,
        poll_s: float = _POLL_S,
    ) -> None:
        """Wait until the condition is met. `ProcessEnded` if a node ends, `rt.Timeout` if the time is over,
        both with the log's end.
        """
        deadline = time.monotonic() + timeout_s
        while not is_met():
            self.check_alive()
            if time.monotonic() > deadline:
                raise Timeout(f"waited for {what}", got=self._all_last_words(), expected=f"{timeout_s:g} s")
            time.sleep(poll_s)

    def wait_ready(self, *, timeout_s: float = WAIT_S) -> str:
        """Wait until all running nodes listen and one leads, and return the leader.

        A node that listens may not have the state of the cluster yet, and then asks clients to try again.
        Raises also `ProcessEnded` if a part of a node fails.
        """
        ports = [self.data_ports[name] for name in self.running]

        def is_ready() -> bool:
            self._check_started()
            return self.leader() is not None and all(map(listens, ports))

        self.wait(is_ready, "the nodes to listen, and one to lead", timeout_s=timeout_s)
        leader = self.leader()
        return self.wait_ready(timeout_s=timeout_s) if leader is None else leader

    def wait_merged(self, position: int, *names: str, timeout_s: float = WAIT_S) -> None:
        """Wait until these nodes (default: all that run) have merged everything below `position`."""
        late = list(names or self.running)

        def is_merged() -> bool:
            late[:] = [name for name in late if self.merged_position(name) < position]
            return not late

        self.wait(is_merged, f"merged logs that end at {position} or later", timeout_s=timeout_s)

    def wait_ended(self, name: str, *, timeout_s: float = WAIT_S) -> int:
        """Wait until a node that cannot continue has ended by itself; its exit status."""
        if self._running[name].wait(timeout_s) is None:
            raise Timeout("a node does not end", where=name, got=self.last_words(name))
        return self._running.pop(name).kill()

    def check_alive(self) -> None:
        """Raise `ProcessEnded` if a node ended that was neither stopped nor killed."""
        for name, process in self._running.items():
            if process.status is not None:
                words = f"status {process.status}: {self.last_words(name)}"
                raise ProcessEnded("a node ended by itself", where=name, got=words)

    def take_ended(self) -> dict[str, int]:
        """The nodes that ended by themselves, or were killed from outside, and their exit statuses. `start`
        starts them again.
        """
        ended = [name for name, process in self._running.items() if process.status is not None]
        return {name: self._running.pop(name).kill() for name in ended}

    def _check_started(self) -> None:
        """Raise `ProcessEnded` if a part of a node has failed since the node was started."""
        for name in self.running:
            if self._logs[name].has_failed:
                raise ProcessEnded("a node cannot start", where=name, got=self.last_words(name))

    def _arguments(self, name: str) -> list[str]:
        ca, cert, key = self._certificates[name]
        members = [
            word
            for each, (raft, data) in self._seen_by(name).items()
            for word in ("--member", f"{each}={raft},{data}")
        ]
        return [
            *("--stream", self.stream, "--name", name, "--directory", str(self.directory(name))),
            *("--ca", ca, "--cert", cert, "--key", key, *members, "--listen", "127.0.0.1"),
            *(("--bootstrap",) if name in self.first else ()),
            *("--raft-port", str(self.raft_ports[name]), "--data-port", str(self.data_ports[name])),
            *("--rest-port", str(self.rest_ports.get(name, 0))),
            *("--health-port", str(self.health_ports.get(name, 0))),
            *self._flags,
        ]

    def _environment(self, name: str) -> dict[str, str]:
        """The environment of a node's processes."""
        del name  # All nodes have the same environment.
        return {key: value for key, value in os.environ.items() if not key.startswith("RT_")}

    def _seen_by(self, name: str) -> dict[str, tuple[str, str]]:
        """The addresses at which this node dials each member, for Raft and for data."""
        return {
            each: (f"127.0.0.1:{self.raft_ports[each]}", f"127.0.0.1:{self.data_ports[each]}")
            for each in {**dict.fromkeys(self.first), name: None}
        }

    def _signal(self, name: str, number: signal.Signals, part: Part) -> None:
        for pid in self.pids(name, part):
            with contextlib.suppress(ProcessLookupError):  # A part has just ended.
                os.kill(pid, number)

    def _all_last_words(self) -> str:
        return "\n".join(f"{name}: {self.last_words(name, 5)}" for name in self.names)


def differences(comparison: Comparison, end: int) -> list[str]:
    """The problems of merged logs that must be equal and end at `end`."""
    ends = [f"{log.path} ends at {log.end}, not at {end}" for log in comparison.logs if log.end != end]
    return [*map(str, comparison.differences), *ends]


def _open_process(pid: int, opened: contextlib.ExitStack) -> int | None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    opened.callback(os.close, fd)
    return fd


def _role(pid: int) -> str:
    """The role of a node's child: the argument after the module's name. Empty if it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""
    return command.partition("child_main\0")[2].partition("\0")[0]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
