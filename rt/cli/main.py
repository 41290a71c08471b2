"""The command `rt`: finds its subcommands, and turns errors into one line and an exit status.

Invariant: subcommands are entry points that are loaded at their first use. A service that is not installed or
is broken affects only its own subcommands.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import click

import rt
from rt.child_process import loading
from rt.cli import logging_setup, standard_streams
from rt.cli.formats.console import report
from rt.cli.options import option
from rt.cli.signals import Interrupted
from rt.errors import InvalidOption, RtError

logger = logging.getLogger("rt.cli")

COMMANDS_GROUP: Final = "rt.commands"

EXIT_FAILED: Final = 1
EXIT_MISUSE: Final = 2
EXIT_INTERRUPTED: Final = 130


class _Unavailable(click.Command):
    """A subcommand that is listed but cannot be loaded; calling it reports why."""

    def __init__(self, name: str, reason: Exception) -> None:
        super().__init__(
            name,
            callback=self._refuse,
            short_help="(not available)",
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
        self._reason = reason

    def _refuse(self) -> None:
        raise RtError(
            f"the command {self.name!r} cannot be loaded",
            got=f"{type(self._reason).__name__}: {self._reason}",
            hint="Install the package that provides it.",
        ) from self._reason


class EntryPointGroup(click.Group):
    """A group whose commands are the entry points of `entry_point_group`."""

    def __init__(self, *arguments: Any, entry_point_group: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._entry_point_group = entry_point_group

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, without loading any."""
        return sorted({*super().list_commands(ctx), *entry_points(group=self._entry_point_group).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command. If that fails, return a command that reports the error."""
        known = super().get_command(ctx, cmd_name)
        if known is not None:
            return known
        found = tuple(entry_points(group=self._entry_point_group, name=cmd_name))
        return _load(found[0]) if found else None


class CommandGroup(EntryPointGroup):
    """The command `rt`: its subcommands are the entry points of `rt.commands`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; an error becomes an exit status and one line on stderr."""
        with _exit_status():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


def _load(entry: EntryPoint) -> click.Command:
    # A command may come from any package, and fail to import in any way.
    try:
        with loading():
            command = entry.load()
    except Exception as reason:  # noqa: BLE001
        return _Unavailable(entry.name, reason)
    if not isinstance(command, click.Command):
        return _Unavailable(entry.name, TypeError(f"{entry.value} is not a click command"))
    return command


@contextlib.contextmanager
def _exit_status() -> Iterator[None]:
    try:
        yield
    except (click.exceptions.Exit, click.ClickException, click.Abort):
        raise
    except Interrupted as signal:
        raise click.exceptions.Exit(signal.exit_status) from signal
    except KeyboardInterrupt as interrupt:
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from interrupt
    except BrokenPipeError as error:
        standard_streams.drop_stdout()
        raise click.exceptions.Exit(0) from error
    except RtError as error:
        status = EXIT_MISUSE if isinstance(error, InvalidOption) else EXIT_FAILED
        raise _failed(error, status) from error
    except ValueError as error:
        raise _failed(error, EXIT_MISUSE) from error
    except OSError as error:
        raise _failed(standard_streams.named(error), EXIT_FAILED) from error


def _failed(error: Exception, status: int) -> click.exceptions.Exit:
    """Print the error on one line; its traceback only with --log-level debug."""
    logger.debug("command_failed", exc_info=error)
    report(error)
    return click.exceptions.Exit(status)


@click.group(
    cls=CommandGroup,
    entry_point_group=COMMANDS_GROUP,
    context_settings={"auto_envvar_prefix": "RT", "help_option_names": ["-h", "--help"]},
)
@click.version_option(rt.__version__, message="rt %(version)s")
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="warning",
    help="Lowest level of log records on stderr.",
)
@option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="Format of log records: text, or one JSON object a line.",
)
def cli(log_level: str, log_format: str) -> None:
    """Reliable transport for streams of messages, on log files.

    Every option can also be set by a variable: RT_LOG_LEVEL=debug, or RT_PUB_STREAM=prices for rt pub.
    """
    logging_setup.configure(log_level, log_format)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `rt`, and return its exit status."""
    # When numpy is imported, it would start a thread for each processor, for computations that rt does not
    # do.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    standard_streams.open_closed()
    try:
        status = cli.main(arguments, prog_name="rt", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = EXIT_INTERRUPTED
    except OSError as error:
        report(standard_streams.named(error))
        status = EXIT_FAILED
    try:
        sys.stdout.flush()
    except OSError:  # it was reported
        standard_streams.drop_stdout()
    return status if isinstance(status, int) else 0
