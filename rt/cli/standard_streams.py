"""The standard streams of the command: they are open from its start, and their errors name the stream."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

from rt.errors import RtError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def open_closed() -> None:
    """Open the standard streams that the caller closed, as `rt ... >&-` does.

    Otherwise the next file that rt opens would get the descriptor of stdout or stderr. Afterwards, reads of
    stdin and writes to stdout fail, so that no output is lost without an error. Output to stderr is dropped.
    """
    for descriptor, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def named(error: OSError) -> Exception:
    """Return `error`, or an error that names the standard stream. Errors of files have a name or are errors
    of rt.
    """
    if error.filename is None and error.errno in _FULL:
        return RtError("cannot write to stdout", got=error.strerror)
    if error.filename is None and error.errno == errno.EBADF:
        return RtError("stdin or stdout is closed", got=error.strerror)
    return error


def drop_stdout() -> None:
    """Stdout is closed: buffered output must not fail again when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
