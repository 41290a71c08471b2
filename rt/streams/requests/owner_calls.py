"""Asks the owner of a queue through the queue's cluster, and waits for its answer.

Invariant: a request is carried out once at most, however often it is sent, and not after `timeout_s`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from rt.errors import Overloaded, RtError
from rt.net.lease_client import REQUEST_ID_BYTES, LeaseCalls, OwnerAnswer
from rt.streams.core.errors import OwnerTimeout

AGAIN_S: Final = 0.2
"""The interval at which the answer is polled."""
GRACE_S: Final = 3.0
"""The answer is awaited for this much longer than the request may be carried out. Clocks differ, and a commit
takes time.
"""
TIMEOUT_S_MAX: Final = 3600.0


async def ask_owner(
    calls: LeaseCalls,
    lease: str,
    content: bytes,
    timeout_s: float,
    *,
    on_no_owner: Callable[[], None] = lambda: None,
) -> bytes:
    """Post a request to the owner of `lease`, on any host. Return the content of its answer.

    `on_no_owner` is called once, if the lease is free: then the request waits. `OwnerTimeout` if no answer
    arrived in time. `rt.Overloaded` if there was no room for the request. Errors that a retry cannot solve
    are raised.
    """
    loop = asyncio.get_running_loop()
    request, until = os.urandom(REQUEST_ID_BYTES), loop.time() + min(timeout_s, TIMEOUT_S_MAX)
    is_posted, has_told, has_table, owner = False, False, True, ""
    failure: RtError | None = None
    while (left_s := until + GRACE_S - loop.time()) > 0:
        call_s = min(left_s, timeout_s)
        try:
            if is_posted:
                found = await calls.find_request(lease, request, timeout_s=call_s)
            elif loop.time() >= until:
                break
            else:
                found = await calls.post_request(
                    lease, request, content, until - loop.time(), timeout_s=call_s
                )
            failure = None
        except RtError as error:
            if not error.retriable:
                raise
            failure, found = error, OwnerAnswer("unknown", b"", owner)
        owner = found.owner
        if found.state == "answered":
            return found.content
        is_posted = is_posted or found.state == "waiting"
        has_table = found.state != "no-table"
        if not owner and failure is None and not has_told:
            has_told = True
            on_no_owner()
        if found.state == "no-room":
            failure = Overloaded("too many requests wait for the owner of the queue", where=lease)
        await asyncio.sleep(AGAIN_S)
    if isinstance(failure, Overloaded) and not is_posted:
        raise failure
    raise _late(lease, timeout_s, owner, failure, has_table=has_table) from failure


def _late(
    lease: str, timeout_s: float, owner: str, failure: RtError | None, *, has_table: bool
) -> OwnerTimeout:
    hint = "No host has kept subscriptions of this queue here: check its name and the group."
    if has_table:
        hint = (
            "The owner carries it out no more, unless it was doing so, or its clock is behind those of the "
            "nodes. Look at `rt streams subscriptions list` before you ask again."
        )
    what, got = "the owner of the queue did not answer in time", f"owner {owner}" if owner else "no owner"
    if failure is not None:
        what = "no node said in time what the owner of the queue answered"
        got = f"{got}, then {failure.reason}" if owner else failure.reason
    return OwnerTimeout(
        what,
        where=lease,
        got=got,
        expected=f"an answer within {timeout_s:g} s",
        hint=hint,
    )
