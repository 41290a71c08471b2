"""How `rt pushes` talks to the push processes of this machine: one socket per process, and lines of JSON.

A push process listens on an abstract Unix socket, named by its user and process id. So no socket remains when
the process dies, and every socket that exists belongs to a running process. A caller sends one request and
reads one answer:

    {"list": true}      {"pushes": [{"directory": ..., "stream": ..., "endpoints": [...], "ended_at": ...,
                         "stuck": ...}]}
    {"stop": "/a/b"}    {"stopped": true}, or {"refused": "why"}

Invariant: either end speaks only with a process of its own user, or of root.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from rt.errors import Closed, ProtocolViolation, RtError, Timeout
from rt.sidecar.protocol import SERVING_FILE

_PREFIX: Final = "rt-push"
_CREDENTIALS: Final = struct.Struct("3i")
LINE_BYTES_MAX: Final = 16 * 2**20
_STOPPED: Final = {"T", "t"}
"""States in /proc of a process that a signal has stopped."""
_READ_BYTES: Final = 64 * 1024


class PushSummary(Struct, frozen=True):
    """A session that a push process serves."""

    directory: str
    stream: str
    endpoints: tuple[str, ...]
    ended_at: float | None = None
    """When its publisher was closed or its program ended: seconds since 1970; None if it still publishes."""
    stuck: str = ""
    """Why no message of the session is merged although messages wait; empty: nothing is wrong."""

    @property
    def session(self) -> str:
        return os.path.basename(self.directory)


class ListRequested(Struct, frozen=True):
    """List what the process serves."""


class StopRequested(Struct, frozen=True):
    """Stop pushing the session in `directory`."""

    directory: str


class PushesListed(Struct, frozen=True):
    pushes: tuple[PushSummary, ...]


class StopAnswered(Struct, frozen=True):
    """`refused` says why the push goes on; None if it was stopped."""

    refused: str | None = None


def socket_name(*, uid: int, pid: int) -> str:
    """A new name for the socket of a process."""
    return f"\0{_PREFIX}/{uid}/{pid}/{os.urandom(4).hex()}"


def listed_sockets(table: str) -> Iterator[tuple[int, int, str]]:
    """User, process id and name of each socket of a push process, from the text of /proc/net/unix."""
    found = {line.rsplit(" ", 1)[-1] for line in table.splitlines() if f"@{_PREFIX}/" in line}
    for name in sorted(found):
        match name.split("/"):
            case [_, uid, pid, _] if uid.isdecimal() and pid.isdecimal():
                yield int(uid), int(pid), "\0" + name.removeprefix("@")


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """User and process id of the other end."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return uid, pid


def encode_request(request: ListRequested | StopRequested) -> bytes:
    said = {"stop": request.directory} if isinstance(request, StopRequested) else {"list": True}
    return json.dumps(said).encode() + b"\n"


def decode_request(line: bytes) -> ListRequested | StopRequested | None:
    """The request in a line; None if it is unknown."""
    match _object(line):
        case {"list": True}:
            return ListRequested()
        case {"stop": str(directory)}:
            return StopRequested(directory)
        case _:
            return None


def encode_answer(answer: PushesListed | StopAnswered) -> bytes:
    said: dict[str, Any]
    if isinstance(answer, PushesListed):
        said = {"pushes": [asdict(push) for push in answer.pushes]}
    else:
        said = {"stopped": True} if answer.refused is None else {"refused": answer.refused}
    return json.dumps(said).encode() + b"\n"


def decode_answer(line: bytes) -> PushesListed | StopAnswered | None:
    """The answer in a line; None if it is unknown."""
    match _object(line):
        case {"pushes": [*pushes]}:
            found = [push for one in pushes if (push := _summary(one)) is not None]
            return PushesListed(tuple(found))
        case {"stopped": True}:
            return StopAnswered()
        case {"refused": str(why)}:
            return StopAnswered(why)
        case _:
            return None


def _object(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _summary(said: object) -> PushSummary | None:
    match said:
        case {
            "directory": str(directory),
            "stream": str(stream),
            "endpoints": [*endpoints],
            "ended_at": float() | int() | None as ended_at,
            **more,
        } if all(isinstance(endpoint, str) for endpoint in endpoints):
            return PushSummary(directory, stream, tuple(endpoints), ended_at, str(more.get("stuck", "")))
        case _:
            return None


class PushSocket(Struct, frozen=True):
    """A push process of this machine, to which another process can send requests."""

    pid: int
    name: str

    def stopped(self) -> list[PushSummary] | None:
        """The sessions that the process serves; None unless a signal has stopped it.

        A stopped process cannot answer.
        """
        process = Path("/proc", str(self.pid))
        try:
            if (process / "stat").read_text().rpartition(")")[2].split()[0] not in _STOPPED:
                return None
            opened = {os.path.realpath(fd) for fd in (process / "fd").iterdir()}
        except (OSError, IndexError):
            return None
        why = f"stopped by a signal and sends nothing: `kill -CONT {self.pid}` lets it go on"
        directories = sorted(os.path.dirname(path) for path in opened if path.endswith(f"/{SERVING_FILE}"))
        streams = [os.path.basename(os.path.dirname(os.path.dirname(path))) for path in directories]
        return [
            PushSummary(directory, stream, (), stuck=why)
            for directory, stream in zip(directories, streams, strict=True)
        ]

    def ask(self, request: ListRequested | StopRequested, *, seconds: float) -> PushesListed | StopAnswered:
        """The answer. `rt.Timeout` if there is none within `seconds`, `rt.Closed` if the process ended."""
        where = f"process {self.pid}"
        try:
            with socket.socket(socket.AF_UNIX) as asking:
                asking.settimeout(seconds)
                asking.connect(self.name)
                uid, _ = peer_of(asking)
                if not _is_trusted(uid):
                    raise ProtocolViolation("a push process of another user", where=where, got=f"user {uid}")
                asking.sendall(encode_request(request))
                line = _read_line(asking)
        except TimeoutError as error:
            raise Timeout("the push process did not answer in time", where=where) from error
        except ConnectionError as error:
            raise Closed("the push process has ended", where=where) from error
        except OSError as error:
            raise RtError("the push process cannot be asked", where=where, got=error.strerror) from error
        if not line:
            raise Closed("the push process has ended", where=where)
        answer = decode_answer(line)
        if answer is None:
            raise ProtocolViolation("the push process gave no valid answer", where=where)
        return answer


def find_push_processes() -> Sequence[PushSocket]:
    """The push processes of this user; of all users if this one is root."""
    table = Path("/proc/net/unix").read_text(errors="replace")
    return [PushSocket(pid, name) for uid, pid, name in listed_sockets(table) if _is_trusted(uid)]


def _is_trusted(uid: int) -> bool:
    return os.geteuid() == 0 or uid == os.geteuid()


def _read_line(connected: socket.socket) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
        data = connected.recv(_READ_BYTES)
        if not data:
            break
        line += data
    return bytes(line)
