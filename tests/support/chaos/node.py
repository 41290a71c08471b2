"""The child process of a chaos run: a node that proposes commands all the time and records what it applies.

Start it with `python -m chaos.node '<settings as JSON>'`. `chaos.checks` describes the files that it writes.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import itertools
import json
import logging
import os
import random
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from msgspec import to_builtins

from chaos.checks import NO_CHAIN
from chaos.power import UndoableDisk
from rt.errors import Closed, Overloaded
from rt.net.tls import TLS
from sequencer.localcluster.processes import Answer, serve
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.raft import Raft

_HEAD = struct.Struct("<Q16s")
_BALLAST_BYTES = 300 * 1024
_OVERLOADED_PAUSE_S = 0.01


class Recorder:
    """A state machine whose whole state is the number of commands and a running hash of them."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.index = 0
        self.chain = bytes.fromhex(NO_CHAIN)

    def apply(self, index: int, command: bytes) -> None:
        """Record the command."""
        self.chain = hashlib.sha256(b"%b%d %b" % (self.chain, index, command)).digest()[:16]
        self.index = index
        name = command.partition(b" ")[0]
        os.write(self._fd, b"%d %b %b\n" % (index, name, self.chain.hex().encode()))

    def snapshot(self) -> Callable[[], bytes]:
        """Return a function that encodes the state, with filler bytes so that some snapshots need several
        chunks.
        """
        index, chain = self.index, self.chain
        return lambda: _HEAD.pack(index, chain) + _ballast(index, chain)

    def digest(self) -> bytes:
        """Return the running hash."""
        return self.chain

    def check(self, state: bytes) -> None:
        """Accept any state, because there is only one version."""

    def restore(self, index: int, state: bytes, _cluster: bytes = b"") -> None:
        """Load the whole state, and record that."""
        at, chain = _HEAD.unpack_from(state) if state else (0, bytes.fromhex(NO_CHAIN))
        assert at == index, (at, index)
        assert not state or state[_HEAD.size :] == _ballast(index, chain)
        self.index, self.chain = index, chain
        os.write(self._fd, b"restore %d %b\n" % (index, chain.hex().encode()))


def _ballast(index: int, chain: bytes) -> bytes:
    return chain * (index % 7 * _BALLAST_BYTES // len(chain))


class Proposer(threading.Thread):
    """Proposes numbered commands in order, a few at a time, until `quiet` is set or the node stops."""

    def __init__(
        self, raft: Raft, name: str, fd: int, quiet: threading.Event, settings: dict[str, Any]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._raft, self._fd, self._quiet = raft, fd, quiet
        self._draw = random.Random(f"{settings['seed']} {name}")
        self._window, self._pause_s = int(settings["window"]), float(settings["pause_s"])

    def run(self) -> None:
        """Propose commands. Each acknowledgement is recorded before the next one is reported."""
        in_flight: deque[Future[int]] = deque()
        try:
            for counter in itertools.count(1):
                if self._quiet.is_set():
                    return
                in_flight.append(self._propose(f"{self.name}.{counter}"))
                while in_flight and (len(in_flight) >= self._window or in_flight[0].done()):
                    in_flight.popleft().result()
                if self._draw.random() < 0.2:
                    time.sleep(self._draw.uniform(0.0, 2 * self._pause_s))
        except Closed:
            pass

    def _propose(self, name: str) -> Future[int]:
        size = self._draw.choice([0, 20, 200, 200, 2000]) if self._draw.random() < 0.99 else 100_000
        command = f"{name} ".encode() + self._draw.randbytes(size)
        while True:
            try:
                future = self._raft.propose(command)
            except Overloaded:
                time.sleep(_OVERLOADED_PAUSE_S)
                continue
            future.add_done_callback(functools.partial(self._acknowledged, name))
            return future

    def _acknowledged(self, name: str, future: Future[int]) -> None:
        if future.exception() is None:
            os.write(self._fd, b"%d %b\n" % (future.result(), name.encode()))


def main() -> None:
    """Run a node until SIGTERM."""
    settings = json.loads(sys.argv[1])
    logging.basicConfig(
        format=f"%(asctime)s {settings['life']} %(levelname)s %(message)s", level=logging.INFO
    )
    faulthandler.register(signal.SIGUSR1)
    out, name, life = settings["out"], settings["name"], settings["life"]
    machine = Recorder(os.path.join(out, f"applied.{life}"))
    config = RaftConfig(
        name=name,
        members=settings["members"],
        directory=settings["directory"],
        stream=settings["stream"],
        bootstrap=True,
        **settings["config"],
    )
    raft = Raft(
        config,
        machine,
        tls=TLS(*settings["tls"]),
        listen=("127.0.0.1", settings["port"]),
        disk=UndoableDisk(settings["journal"], lies_about=settings["lies_about"]),
    )
    acked = os.open(os.path.join(out, f"acked.{life}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    quiet = threading.Event()
    for thread in range(settings["threads"]):
        Proposer(raft, f"{name}.{life}.{thread}", acked, quiet, settings).start()

    def answer(do: str, arguments: Answer) -> Answer:
        if do == "quiet":
            quiet.set()
        if do == "hand_over":
            return {"is_led_by_another": raft.transfer_leadership(arguments["seconds"])}
        return {**to_builtins(raft.status()), "machine": machine.index, "hash": machine.chain.hex()}

    serve(answer)
    raft.stop()


if __name__ == "__main__":
    main()
