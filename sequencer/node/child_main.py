"""The two processes of a node: `python -m sequencer.node.child_main control|data [FD]`, started by `rt node`.

The settings arrive as one line of JSON on stdin, which stays open. If it closes, the parent has ended, and
this process ends at once; the kernel also kills it when the parent dies. SIGTERM stops it in good order. Both
use the same exit statuses, and send heartbeats to the parent. FD is the listening socket of the health port,
which the parent shares.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import importlib
import logging
import os
import resource
import signal
import sys
from typing import Final, NoReturn

from rt.child_process import die_with_stdin, loading, spare_what_is_loaded, stdin_lines
from rt.errors import CertificateError, ClusterMismatch, Diverged, FormatError, InvalidName, RtError
from sequencer.config import logging_setup
from sequencer.config.config import BadSetting, NodeConfig
from sequencer.config.restart_policy import ExitStatus, RestartLater
from sequencer.ipc.supervisor_link import SupervisorLink
from sequencer.raft.model.members import MemberRemoved

STATUSES: Final[tuple[tuple[type[BaseException], ExitStatus], ...]] = (
    (Diverged, ExitStatus.DIVERGED),
    # Files and settings stay the same, even if they are read again.
    (FormatError, ExitStatus.FAILED),
    (ClusterMismatch, ExitStatus.FAILED),
    (BadSetting, ExitStatus.FAILED),
    (InvalidName, ExitStatus.FAILED),
    (RestartLater, ExitStatus.RESET),
)
"""The first match counts. A missing permission, and a directory or a link in the place of a file
(`_UNUSABLE`), are FAILED too. Certificates are an exception, because they may be replaced at this moment. Any
other error (a failed or full disk, a port or directory that an earlier child still holds, a bug) may
disappear after a restart: FELL.
"""
_UNUSABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ELOOP})

_PR_SET_PDEATHSIG: Final = 1

logger = logging.getLogger("sequencer.node.child_main")


def exit_status(error: BaseException) -> ExitStatus:
    """The exit status of a process that `error` has stopped."""
    if isinstance(error, MemberRemoved):
        return ExitStatus.RESET if error.is_listed else ExitStatus.FAILED
    known = next((status for kind, status in STATUSES if isinstance(error, kind)), None)
    if known is not None:
        return known
    is_unusable = not isinstance(error, CertificateError) and _errno(error) in _UNUSABLE
    return ExitStatus.FAILED if is_unusable else ExitStatus.FELL


def _errno(error: BaseException) -> int | None:
    """The errno of the error, or of the system's error that caused it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return None if cause is None else cause.errno


def main() -> NoReturn:
    """Run the child that the command line names, until SIGTERM or a failure."""
    die_with_parent()
    allow_many_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    role = sys.argv[1]
    settings = next(stdin_lines(), None)
    if settings is None:  # The parent was killed before it wrote. No process reads an error.
        sys.exit(ExitStatus.FELL)
    config = NodeConfig.from_json(settings.decode())
    logging_setup.configure(role, config.log_level, config.log_format)
    die_with_stdin()
    try:
        run = run_control if role == "control" else run_data
        run(config, SupervisorLink.of_child(*sys.argv[2:]))
    except BaseException as error:  # noqa: BLE001  # The parent learns of any error by the exit status.
        _leave(error)
    logger.info("process_stopped")
    _end(ExitStatus.STOPPED)


def run_control(config: NodeConfig, supervisor: SupervisorLink) -> None:
    with loading():
        from sequencer.control.process import ControlProcess

    spare_what_is_loaded()
    control = ControlProcess(
        config,
        on_failure=_leave,
        on_epoch_over=lambda _: _end(ExitStatus.RESET),
        on_alive=supervisor.beat,
    )
    signal.signal(signal.SIGTERM, lambda *_: control.stop())
    control.run()


def run_data(config: NodeConfig, supervisor: SupervisorLink) -> None:
    with loading():
        import uvloop

        from sequencer.data.process import DataProcess

        if config.rest_port or config.health_port:
            # Import now, not while serving: aiohttp takes 0.3 s.
            importlib.import_module("sequencer.rest.http.app")

    spare_what_is_loaded()

    async def serve() -> None:
        data = DataProcess(config, supervisor)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, data.stop)
        await data.run()

    uvloop.run(serve())


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends.

    If the parent ended before this call, the end of stdin shows it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def allow_many_files() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard limit: each session has five."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leave(error: BaseException) -> NoReturn:
    """Log the error and end at once, from any thread: nothing may follow a failure."""
    status = exit_status(error)
    if isinstance(error, RestartLater):
        logger.warning("process_restarting reason=%r", str(error))
    elif isinstance(error, RtError | OSError):
        logger.critical("process_failed status=%d error=%r", status, str(error))
    else:
        logger.critical("process_failed status=%d error=%r", status, repr(error), exc_info=error)
    _end(status)


def _end(status: ExitStatus) -> NoReturn:
    """End without the interpreter's shutdown, which would wait for threads that may hang on a broken disk."""
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
