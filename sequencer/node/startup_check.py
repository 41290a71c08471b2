"""Checks before a node's processes start: an error that a restart does not fix must end the node with one
line.

Invariant: nothing is changed. A check that passes guarantees nothing: the processes may meet the same errors
later.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from rt.errors import RtError, StorageError
from sequencer.config.config import NodeConfig
from sequencer.raft.transport.listener import bind_socket

PORT_SECONDS_MAX: Final = 5.0
"""How long a port may still be held by the processes of a node that was killed."""
_LOOK_SECONDS: Final = 0.1


def check_ports(config: NodeConfig, *, seconds_max: float = PORT_SECONDS_MAX) -> None:
    """`rt.RtError` if another process has the gRPC or Raft port, or if this process may not listen on it.

    The ports of REST and health are not checked: the node serves its stream without them, and tries again.
    """
    for option, port in (("--data-port", config.data_port), ("--raft-port", config.raft_port)):
        deadline = time.monotonic() + seconds_max
        while (error := _bind_error(config.listen, port)) is not None:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                continue
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise RtError(
                f"the node cannot listen on port {port} ({option})",
                where=config.listen or "all addresses",
                got=reason,
                hint=_hint(error, option, port),
            ) from error


def _bind_error(listen: str, port: int) -> OSError | None:
    try:
        bind_socket((listen, port)).close()
    except OSError as error:
        return error
    return None


def _hint(error: OSError, option: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            member = "data" if option == "--data-port" else "raft"
            return (
                f"Stop the process that has it (`ss -ltnp sport = :{port}` shows it), or set {option} and "
                f"the {member} address of this member in --member to another port."
            )
        case errno.EACCES | errno.EPERM:
            return f"This user may not listen there: set {option} to 1024 or more."
        case _:
            return "Set --listen to an address of this machine, or leave it out to listen on all."


def may_write(path: str) -> bool:
    return os.access(path, os.W_OK | os.X_OK)


def check_directories(config: NodeConfig, *, may_write: Callable[[str], bool] = may_write) -> None:
    """Check the directories of an earlier start. `rt.StorageError` if one is no directory, or cannot be
    written now.
    """
    stream = os.path.dirname(config.sessions_directory)
    for path in (
        config.directory,
        config.raft_directory,
        stream,
        config.sessions_directory,
        config.merged_directory,
    ):
        if not os.path.lexists(path):
            continue
        if not os.path.isdir(path) or not may_write(path):
            raise unwritable(path, "not writable")


def unwritable(path: str, reason: str | None) -> StorageError:
    """The error for a directory of the node that the node's user cannot write, or for a path that is no
    directory.
    """
    if os.path.lexists(path) and not os.path.isdir(path):
        is_link = os.path.islink(path)
        return StorageError(
            "the node cannot use its directory (--directory)",
            where=path,
            got=f"a link to {os.readlink(path)}, where no directory is" if is_link else "a file",
            expected="a directory",
            hint="Mount the file system to which the link leads, or change the link."
            if is_link
            else "Move the file away, or set another directory.",
        )
    owner = ""
    hint = "Change its owner to the user that runs the node (`chown -R`), or set another directory."
    with suppress(OSError):
        found = os.stat(path)
        mode = f"mode {stat.S_IMODE(found.st_mode):04o}"
        owner = f", owned by {_user(found.st_uid)}, {mode}, and the node runs as {_user(os.geteuid())}"
        if found.st_uid == os.geteuid():
            hint = "Mount its file system for writing, or give its owner the right to write (`chmod u+rwx`)."
    return StorageError(
        "the node's directory cannot be written (--directory)", where=path, got=f"{reason}{owner}", hint=hint
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
