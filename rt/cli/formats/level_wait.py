"""Waiting until what `rt pub` published is flushed, replicated or merged, and what to say if it is not.

Invariant: whatever ends the wait, `Reached` says how many messages reached each level and who sends the rest.
"""

from __future__ import annotations

import time
from typing import Final, Literal

from msgspec import Struct

from rt.cli.formats.console import progress
from rt.cli.formats.publish_loop import PublishedCount
from rt.cli.formats.tables import count_of
from rt.cli.signals import Interrupted, Interrupts
from rt.client.publisher import Publisher
from rt.errors import Fenced, RtError, Timeout
from rt.sidecar import push_pool

Level = Literal["flushed", "replicated", "merged"]

_LOOK_SECONDS: Final = 0.2
"""How often the progress bar is updated."""


class Reached(Struct):
    """What the messages of the command have reached."""

    level: Level
    is_reached: bool = False
    """Whether all messages have reached it."""
    replicated: int = 0
    merged: int = 0
    reason: Literal["timeout", "interrupted", "refused", "fenced", "not flushed"] | None = "not flushed"
    """Why the level was not reached; None if it was."""
    push_pid: int | None = None
    """The process that sends the rest; None if there is none."""
    problem: str | None = None
    """What is missing, where it is, and what to do."""


def wait_for_level(
    publisher: Publisher,
    fed: PublishedCount,
    reached: Reached,
    seconds: float,
    interrupts: Interrupts,
    *,
    is_quiet: bool,
) -> None:
    """Wait up to `seconds` until the messages, which are flushed, have reached `reached.level`.

    Fills in `reached`. Raises only `Interrupted`.
    """
    if reached.level == "flushed" or fed.end is None:
        reached.is_reached, reached.reason = True, None
        _note(publisher, fed, reached)
        return
    why = f"timed out after {seconds:g} s"
    try:
        _wait(publisher, fed, reached, seconds, interrupts, is_quiet=is_quiet)
    except Timeout:
        reached.reason = "timeout"
    except Interrupted:
        reached.reason, why = "interrupted", "interrupted"
        raise
    except RtError as error:
        reached.reason, why = "fenced" if isinstance(error, Fenced) else "refused", str(error)
    finally:
        _note(publisher, fed, reached)
        if getattr(reached, reached.level) == fed.message_count:  # An interrupt may come too late.
            reached.is_reached, reached.reason = True, None
        else:
            reached.problem = _problem(publisher, fed, reached, why)


def _wait(
    publisher: Publisher,
    fed: PublishedCount,
    reached: Reached,
    seconds: float,
    interrupts: Interrupts,
    *,
    is_quiet: bool,
) -> None:
    assert fed.end is not None
    assert reached.level != "flushed"
    deadline = time.monotonic() + seconds
    label = f"waiting until {reached.level}"
    with progress(label, total=fed.message_count, unit="msg", is_quiet=is_quiet) as bar:
        while True:
            left = deadline - time.monotonic()
            try:
                with interrupts.waiting():
                    publisher.wait(fed.end - 1, reached.level, min(max(left, 0.0), _LOOK_SECONDS))
                return
            except Timeout:
                if left <= _LOOK_SECONDS:
                    raise
            _note(publisher, fed, reached)
            bar.reach(getattr(reached, reached.level), fed.message_count)


def _note(publisher: Publisher, fed: PublishedCount, reached: Reached) -> None:
    if publisher.status().state != "local":
        reached.push_pid = next(iter(push_pool.shared().pids), None)
    if fed.first is None or fed.end is None:
        return
    levels = publisher.progress
    reached.replicated = min(max(levels.replicated, fed.first), fed.end) - fed.first
    reached.merged = min(max(levels.merged, fed.first), fed.end) - fed.first


def _problem(publisher: Publisher, fed: PublishedCount, reached: Reached, why: str) -> str:
    missing = fed.message_count - getattr(reached, reached.level)
    verb = "is" if missing == 1 else "are"
    total = count_of(fed.message_count, "message")
    what = f"{missing:,} of {total} {verb} not {reached.level}: {why.rstrip('.')}."
    kept = f"All are on disk, in {publisher.directory}."
    if reached.reason in {"refused", "fenced"}:
        return f"{what} {kept}"
    if reached.push_pid is None:
        return f"{what} {kept} Start `rt push` on that directory to send them."
    return (
        f"{what} {kept} Process {reached.push_pid} continues to send them. `rt pushes list` shows it, "
        f"and `rt pushes stop {publisher.session}` stops it."
    )
