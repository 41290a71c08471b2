"""Wait until the messages of `rt pub` are flushed, replicated or merged, and describe the problem if they are
not.

Invariant: however the wait ends, `WaitOutcome` says how many messages reached each level, and which process
sends the rest.
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


class WaitOutcome(Struct):
    """The levels that the messages of the command have reached."""

    level: Level
    is_level_reached: bool = False
    """Whether all messages have reached `level`."""
    replicated: int = 0
    merged: int = 0
    reason: Literal["timeout", "interrupted", "refused", "fenced", "not flushed"] | None = "not flushed"
    """Why the level was not reached; None if it was."""
    push_pid: int | None = None
    """The process that sends the rest; None if there is none."""
    problem: str | None = None
    """Which messages have not reached the level, where they are, and what to do."""


def wait_for_level(
    publisher: Publisher,
    published: PublishedCount,
    outcome: WaitOutcome,
    seconds: float,
    interrupts: Interrupts,
    *,
    is_quiet: bool,
) -> None:
    """Wait up to `seconds` until the messages, which are flushed, have reached `outcome.level`.

    Fills in `outcome`. Raises only `Interrupted`.
    """
    if outcome.level == "flushed" or published.end is None:
        outcome.is_level_reached, outcome.reason = True, None
        _update_counts(publisher, published, outcome)
        return
    why = f"timed out after {seconds:g} s"
    try:
        _wait(publisher, published, outcome, seconds, interrupts, is_quiet=is_quiet)
    except Timeout:
        outcome.reason = "timeout"
    except Interrupted:
        outcome.reason, why = "interrupted", "interrupted"
        raise
    except RtError as error:
        outcome.reason, why = "fenced" if isinstance(error, Fenced) else "refused", str(error)
    finally:
        _update_counts(publisher, published, outcome)
        # An interrupt may come after the level was reached.
        if getattr(outcome, outcome.level) == published.message_count:
            outcome.is_level_reached, outcome.reason = True, None
        else:
            outcome.problem = _problem(publisher, published, outcome, why)


def _wait(
    publisher: Publisher,
    published: PublishedCount,
    outcome: WaitOutcome,
    seconds: float,
    interrupts: Interrupts,
    *,
    is_quiet: bool,
) -> None:
    assert published.end is not None
    assert outcome.level != "flushed"
    deadline = time.monotonic() + seconds
    label = f"waiting until {outcome.level}"
    with progress(label, total=published.message_count, unit="msg", is_quiet=is_quiet) as bar:
        while True:
            left = deadline - time.monotonic()
            try:
                with interrupts.waiting():
                    publisher.wait(published.end - 1, outcome.level, min(max(left, 0.0), _LOOK_SECONDS))
                return
            except Timeout:
                if left <= _LOOK_SECONDS:
                    raise
            _update_counts(publisher, published, outcome)
            bar.reach(getattr(outcome, outcome.level), published.message_count)


def _update_counts(publisher: Publisher, published: PublishedCount, outcome: WaitOutcome) -> None:
    if publisher.status().state != "local":
        outcome.push_pid = next(iter(push_pool.shared().pids), None)
    if published.first is None or published.end is None:
        return
    levels = publisher.progress
    outcome.replicated = min(max(levels.replicated, published.first), published.end) - published.first
    outcome.merged = min(max(levels.merged, published.first), published.end) - published.first


def _problem(publisher: Publisher, published: PublishedCount, outcome: WaitOutcome, why: str) -> str:
    missing = published.message_count - getattr(outcome, outcome.level)
    verb = "is" if missing == 1 else "are"
    total = count_of(published.message_count, "message")
    what = f"{missing:,} of {total} {verb} not {outcome.level}: {why.rstrip('.')}."
    kept = f"All are on disk, in {publisher.directory}."
    if outcome.reason in {"refused", "fenced"}:
        return f"{what} {kept}"
    if outcome.push_pid is None:
        return f"{what} {kept} Start `rt push` on that directory to send them."
    return (
        f"{what} {kept} Process {outcome.push_pid} continues to send them. `rt pushes list` shows it, "
        f"and `rt pushes stop {publisher.session}` stops it."
    )
