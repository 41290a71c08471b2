"""A cluster on this machine that stays: nodes, ports, certificates and data in one directory.

DIR/cluster.json       stream, and the ports of each node: written once
DIR/n1/, DIR/n1.log    data and log of node n1
DIR/pki/               the CA; certificates of nodes; feed1 (publisher), reader1 (subscriber), ops (operator)
DIR/clients/           what programs that use `url` keep on this host
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from rt.errors import InvalidOption, RtError, StorageError
from rt.log.disk import REAL, storage_errors
from rt.log.whole_files import write_whole
from rt.names import check_name
from rt.net.dev_pki import issue, write_p12
from rt.net.identity import Identity, Role
from rt.option_checks import read_settings
from sequencer.config.config import DATA_PORT, RAFT_PORT, REST_PORT, SOCKET_PATH_BYTES
from sequencer.localcluster.loopback import NodePorts, choose_ports, is_free, issued_at
from sequencer.localcluster.nodes import LocalCluster
from sequencer.localcluster.processes import ProcessEnded

CLIENTS: Final[Mapping[str, Role]] = {"feed1": "publisher", "reader1": "subscriber", "ops": "operator"}
"""Names and roles of the certificates that are made for programs."""
_CHECK_S: Final = 0.5
_RESTART_S: Final = 5.0


class DevCluster:
    """The existing cluster in `root`, or a new one of `nodes` nodes. Leaving the context stops the nodes.

    A new cluster has the usual ports, if they are free and unless `has_any_ports`.

    Raises `rt.InvalidOption` if `root` holds a cluster with another stream or number of nodes,
    `rt.DirectoryLocked` if the cluster runs.
    """

    def __init__(
        self,
        root: Path,
        *,
        nodes: int | None = None,
        stream: str | None = None,
        has_any_ports: bool = False,
    ) -> None:
        self.root = root.absolute()
        if len(os.fsencode(self.root / "n1" / "control")) >= SOCKET_PATH_BYTES:
            raise InvalidOption(
                "the directory's path is too long for the Unix sockets in it",
                where=self.root,
                expected=f"at most {SOCKET_PATH_BYTES - len('/n1/control') - 1} bytes",
            )
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError("the directory cannot be made", where=self.root, got=error.strerror) from error
        with storage_errors(str(self.root / "lock"), "locking the cluster's directory"):
            self._lock = REAL.lock(str(self.root / "lock"))
        try:
            stream, ports = _ports(self.root, nodes, stream, has_any=has_any_ports)
            self.nodes = LocalCluster(self.root, len(ports), stream=stream, ports=ports)
            self._issue()
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.nodes.stop()
        finally:
            self.nodes.__exit__(*error)
            self._lock.close()

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def url(self) -> str:
        """The URL for `rt.connect`."""
        place = f"{','.join(self.nodes.endpoints)}/{self.nodes.stream}"
        return f"rt://{place}?tls_dir={self.pki}&path={self.root / 'clients'}"

    @property
    def page(self) -> str:
        """Address of the status page."""
        return f"https://127.0.0.1:{next(iter(self.nodes.rest_ports.values()))}/"

    def start(self) -> str:
        """Start the nodes, wait until one leads, and return its name."""
        self.nodes.start()
        return self.nodes.wait_ready()

    def watch(self, on_event: Callable[[str], object]) -> None:
        """Watch the nodes indefinitely. `on_event` gets a line each time that a node ends or starts again.

        If a node was killed, it starts again after a while, as a service manager does it. If a node ended by
        itself, it does not start again. `ProcessEnded` if no node is left.
        """
        due_s: dict[str, float] = {}
        while True:
            now_s = time.monotonic()
            for name, status in self.nodes.take_ended().items():
                if status < 0:
                    due_s[name] = now_s + _RESTART_S
                    how = f"was killed by signal {-status}. It starts again in {_RESTART_S:g} s"
                else:
                    how = f"ended with status {status}. The end of its log:\n{self.nodes.last_words(name)}"
                on_event(f"{name} {how}")
            if not self.nodes.running and not due_s:
                raise ProcessEnded("all nodes have ended", where=self.root, hint="Their logs say why.")
            for name in [name for name, at_s in due_s.items() if at_s <= now_s]:
                del due_s[name]
                self.nodes.start(name)
                on_event(f"{name} starts again")
            time.sleep(_CHECK_S)

    def _issue(self) -> None:
        """Issue new certificates for programs. Running programs reload them."""
        for name, role in CLIENTS.items():
            issue(self.pki, Identity(self.nodes.stream, role, name), renew=True, now=issued_at())
        write_p12(self.pki, "ops")


def _ports(
    root: Path, nodes: int | None, stream: str | None, *, has_any: bool
) -> tuple[str, dict[str, NodePorts]]:
    """Stream and ports from the directory's file. The file is written if it does not exist."""
    file = root / "cluster.json"
    try:
        saved = json.loads(read_settings(file, is_regular=True))
        found = saved["stream"], {name: NodePorts(*ports) for name, ports in saved["ports"].items()}
    except FileNotFoundError:
        if there := sorted(path.parent.name for path in root.glob("n*/raft")):
            raise StorageError(
                "the directory has nodes, and not the settings of their cluster",
                where=file,
                got=", ".join(there),
                hint="Put the file back. To begin again, use another --directory, or remove this one.",
            ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StorageError("the cluster's settings cannot be read", where=file, got=str(error)) from error
    else:
        _check_same(file, "stream", stream, found[0])
        _check_same(file, "nodes", nodes, len(found[1]))
        _check_free(found[1])
        return found
    stream = check_name(stream or "dev", kind="stream")
    ports = _new_ports([f"n{number}" for number in range(1, (nodes or 3) + 1)], has_any=has_any)
    with storage_errors(str(file), "writing the cluster's settings"):
        text = json.dumps({"stream": stream, "ports": ports}, indent=1)
        write_whole(REAL, str(file), f"{text}\n".encode())
    return stream, ports


def _check_same(file: Path, what: str, asked: object, saved: object) -> None:
    if asked is not None and asked != saved:
        raise InvalidOption(
            f"the directory holds a cluster with another --{what}",
            where=file,
            got=asked,
            expected=saved,
            hint=f"Leave out --{what}, or use another --directory.",
        )


def _check_free(ports: Mapping[str, NodePorts]) -> None:
    for name, own in ports.items():
        for port in filter(None, own):
            if not is_free(port):
                raise RtError(
                    f"a port of node {name} is in use",
                    where=f"127.0.0.1:{port}",
                    hint="Stop the program that listens on it, or use another --directory.",
                )


def _new_ports(names: list[str], *, has_any: bool) -> dict[str, NodePorts]:
    """The usual ports and the ports after them; other ports if one of these is in use."""
    usual = {name: NodePorts(DATA_PORT + at, RAFT_PORT + at, REST_PORT + at) for at, name in enumerate(names)}
    if not has_any and all(is_free(port) for own in usual.values() for port in filter(None, own)):
        return usual
    return {name: own._replace(health=0) for name, own in choose_ports(names, with_rest=True).items()}
