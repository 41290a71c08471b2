"""`rt pushes`: the push processes that programs on this machine have started, even if these programs have
ended.

Invariant: stopping a push loses nothing. The session directory stays as it is, and the next push of it
continues after the messages that the nodes have.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Final

import click

from rt.cli.formats.console import report
from rt.cli.formats.push_table import Push, Unsent, push_lines, push_object, read_unsent
from rt.cli.formats.tables import count_of, escape
from rt.cli.options import STREAM_NAME, FiniteRange, json_option, option
from rt.errors import Closed, RtError, Timeout
from rt.sidecar.push_control import (
    ListRequested,
    PushesListed,
    PushSocket,
    StopAnswered,
    StopRequested,
    find_push_processes,
)

_ANSWER_SECONDS: Final = 5.0


@click.group()
def pushes() -> None:
    """Show and stop the pushes that publishers on this machine have started.

    A publisher with endpoints starts a process that pushes its session to the nodes. That process continues
    after the program has ended, until the nodes have everything. Shown are the processes of the user that
    runs the command, and all processes to root.
    """


@pushes.command("list")
@json_option
@click.pass_context
def list_pushes(ctx: click.Context, as_json: bool) -> None:
    """List the pushes: session, stream, process, since when its program has ended, what is unsent, stuck.

    Unsent is what a majority of the nodes has not synced. Stuck says why nothing of the session was merged
    for 10 seconds although some of it waits. Exit status 1 means that a process did not answer.
    """
    found, problems = _find()
    if as_json:
        for push in found:
            click.echo(json.dumps(push_object(push)))
    else:
        click.echo("\n".join(push_lines(found)))
    for problem in problems:
        report(problem)
    if problems:
        ctx.exit(1)


@pushes.command()
@click.argument("which", metavar="SESSION|DIR")
@option("--stream", type=STREAM_NAME, help="Stop only the session of this stream. Default: of any stream.")
@option(
    "--timeout",
    type=FiniteRange(0.1, 3600),
    default=10.0,
    help="Longest wait until the push has stopped. Seconds.",
)
@json_option
def stop(which: str, stream: str | None, timeout: float, as_json: bool) -> None:
    """Stop the push of an ended program: of the session SESSION, or of the one in the directory DIR.

    Nothing is lost: the messages stay on disk. The next publisher of the session sends them, or rt push.
    The push of a program that still runs is not stopped: close its publisher instead.
    """
    deadline = time.monotonic() + timeout
    found, problems = _find()
    for problem in problems:
        report(problem)
    chosen = _choose(found, which, stream)
    for push in chosen:
        _stop(push, deadline, timeout)
        # The nodes may have received more since the pushes were listed.
        stopped = Push(push.pid, push.summary, read_unsent(push.summary.directory))
        if as_json:
            click.echo(json.dumps(push_object(stopped)))
        else:
            click.echo(_stopped_line(stopped))


def _find() -> tuple[list[Push], list[RtError]]:
    """The pushes, and the problems of processes that did not answer."""
    found: list[Push] = []
    problems: list[RtError] = []
    for process in find_push_processes():
        if (stopped := process.stopped()) is not None:
            found += [Push(process.pid, push, read_unsent(push.directory)) for push in stopped]
            continue
        try:
            answer = process.ask(ListRequested(), seconds=_ANSWER_SECONDS)
        except Closed:
            continue
        except RtError as error:
            problems.append(error)
            continue
        if isinstance(answer, PushesListed):
            found += [Push(process.pid, push, read_unsent(push.directory)) for push in answer.pushes]
    found.sort(key=lambda push: (push.summary.stream, push.summary.session, push.summary.directory))
    return found, problems


def _choose(found: Sequence[Push], which: str, stream: str | None) -> list[Push]:
    """The pushes of the only directory that `which` matches. `rt.RtError` if it matches none or several."""
    if os.sep in which or which in {os.curdir, os.pardir}:
        path = os.path.realpath(which)
        chosen = [push for push in found if os.path.realpath(push.summary.directory) == path]
    else:
        chosen = [push for push in found if push.summary.session == which]
    if stream is not None:
        chosen = [push for push in chosen if push.summary.stream == stream]
    directories = sorted({push.summary.directory for push in chosen})
    if not directories:
        names = ", ".join(f"{push.summary.stream}/{push.summary.session}" for push in found)
        raise RtError(
            "there is no such push on this machine",
            got=which if stream is None else f"{which} of stream {stream}",
            expected=f"one of {names}" if names else None,
            hint="`rt pushes list` shows all pushes of this user.",
        )
    if len(directories) > 1:
        raise RtError(
            "several pushes have that name",
            got=which,
            expected=" or ".join(directories),
            hint="Name the directory, or --stream.",
        )
    return chosen


def _stop(push: Push, deadline: float, timeout: float) -> None:
    """Stop the push, and return when it has stopped. `rt.RtError` if it continues, `rt.Timeout` if the
    outcome is not known in time.
    """
    seconds = max(deadline - time.monotonic(), 0.1)
    directory = push.summary.directory
    named = next((process for process in find_push_processes() if process.pid == push.pid), None)
    if named is None:
        return  # It has ended by itself.
    try:
        answer = PushSocket(push.pid, named.name).ask(StopRequested(directory), seconds=seconds)
    except Closed:
        return
    except Timeout as error:
        raise Timeout(
            f"the push has not stopped within {timeout:g} s",
            where=f"{directory}, process {push.pid}",
            hint=f"Its messages stay on disk. `kill {push.pid}` ends the process and all its pushes.",
        ) from error
    if isinstance(answer, StopAnswered) and answer.refused is not None:
        raise RtError("the push was not stopped", where=directory, got=answer.refused)


def _stopped_line(push: Push) -> str:
    """A line: which push was stopped, which messages stay, and what sends them."""
    summary, unsent = push.summary, push.unsent
    line = f"Stopped the push of {summary.stream}/{summary.session} (process {push.pid})."
    directory = escape(summary.directory)
    if isinstance(unsent, Unsent) and not unsent.messages:
        return f"{line} Nothing was unsent."
    what = count_of(unsent.messages, "unsent message") if isinstance(unsent, Unsent) else "What is unsent"
    verb = "stays" if isinstance(unsent, str) or unsent.messages == 1 else "stay"
    return (
        f"{line} {what} {verb} in {directory}. The next publisher of the session sends them, or "
        f"`rt push {directory} --stream {summary.stream}`."
    )
