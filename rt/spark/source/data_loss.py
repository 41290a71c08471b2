"""Reports messages that a query requested and that are missing, as an error or in the log.

Invariant: no loss is silent. The option `failOnDataLoss` chooses between the two.
"""

from __future__ import annotations

import logging

from rt.errors import Gap
from rt.events import BadMessage, SkipForward
from rt.log.read.range_reader import LossHandler

logger = logging.getLogger("rt.spark")

_HINT = "Set failOnDataLoss=false to continue without them."


def loss_handler(where: object, *, fail: bool) -> LossHandler:
    """How to report missing messages of the log `where`."""

    def on_loss(event: SkipForward | BadMessage) -> None:
        if fail:
            raise _gap(event, where)
        logger.warning("data_loss where=%s event=%s", where, event)

    return on_loss


def beyond_end(what: str, position: int, end: int, where: object, *, fail: bool) -> None:
    """`what` is at `position`, after the end of the log: raise, or log."""
    event = SkipForward(end, position, "not there")
    if fail:
        hint = f"Is it another log, or a copy that lags? {_HINT}"
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
        f"the query needs position {event.wanted}, but the log starts again at position {event.resumed}: "
        f"{count} messages are missing ({event.reason})",
        event=event,
        where=where,
        hint=_HINT,
    )
