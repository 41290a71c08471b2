"""Messages that a query asked for and that cannot be had: an error, or a line of the log.

Law: nothing is left out silently. Which of the two it is, says the option `failOnDataLoss`.
"""

from __future__ import annotations

import logging

from rt.errors import Gap
from rt.events import BadMessage, SkipForward
from rt.log.ranges import LossHandler

logger = logging.getLogger("rt.spark")

_HINT = "Set failOnDataLoss=false to go on without them."


def loss_handler(where: object, *, fail: bool) -> LossHandler:
    """What to do about messages of the log `where` that cannot be had."""

    def on_loss(event: SkipForward | BadMessage) -> None:
        if fail:
            raise _gap(event, where)
        logger.warning("data_loss where=%s event=%s", where, event)

    return on_loss


def beyond_end(what: str, position: int, end: int, where: object, *, fail: bool) -> None:
    """`what` says `position`, which the log has not reached: raise, or log."""
    event = SkipForward(end, position, "not there")
    if fail:
        hint = f"Is it another log, or a copy that is behind? {_HINT}"
        raise Gap(
            f"{what} is at position {position}, but the log ends with {end}",
            event=event,
            where=where,
            hint=hint,
        )
    logger.warning("data_loss where=%s event=%s", where, event)


def _gap(event: SkipForward | BadMessage, where: object) -> Gap:
    if isinstance(event, BadMessage):
        what = f"messages {event.start} to {event.end - 1} cannot be decoded: {event.reason}"
        return Gap(what, event=event, where=f"{event.path}, offset {event.offset}", hint=_HINT)
    count = event.resumed - event.wanted
    return Gap(
        f"position {event.wanted} is wanted, but the log has nothing before position {event.resumed}: "
        f"{count} messages are gone ({event.reason})",
        event=event,
        where=where,
        hint=_HINT,
    )
