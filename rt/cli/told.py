"""What readers tell beside their messages, on stderr."""

from __future__ import annotations

import click

from rt.cli.text import escape
from rt.events import BadMessage, BadTail, Event, HoldRefused, Reset, SkipForward


class Told:
    """An event handler that prints. `has_lost` after messages that are in the log, but cannot be read."""

    def __init__(self) -> None:
        self.has_lost = False

    def __call__(self, event: Event) -> None:
        """Print it."""
        self.has_lost |= isinstance(event, BadMessage)
        click.echo(f"rt: {escape(in_words(event))}", err=True)


def in_words(event: Event) -> str:
    """An event as a sentence."""
    match event:
        case SkipForward(wanted, resumed, reason):
            return f"messages {wanted} to {resumed - 1} are gone ({reason}): going on at {resumed}"
        case BadTail(path, offset, torn_bytes):
            return f"{path} ends in a batch that is not whole: {torn_bytes} bytes at offset {offset} left out"
        case BadMessage(start, end, path, offset, reason):
            return f"messages {start} to {end - 1} ({path}, offset {offset}) cannot be read: {reason}"
        case Reset(position, merged_x):
            return f"the stream was reset: position {position} is the first of epoch {merged_x}"
        case HoldRefused(name, why):
            return f"the nodes hold nothing back for {name}: {why}"
