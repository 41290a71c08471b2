"""How many plans may wait for input or disk space in the memory of a node. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

from sequencer.state.write_plan import WritePlan

PLANS_MAX: Final = 1 << 16
"""Maximum number of plans: about 100 MB, if each has a few ranges."""
PLANS_BYTES_MAX: Final = 2 << 30
"""Maximum number of merged bytes that the plans write. It bounds the number of their ranges: a plan may have
1,024, each of 400 bytes in memory. The limit is twice the leader's limit, as that of
`sequencer.control.state_machine`. So a majority has the bytes of older plans durably.
"""


def take_surplus(plans: deque[WritePlan]) -> list[WritePlan]:
    """Remove and return the oldest plans above the limits. Their bytes must come from another node."""
    surplus: list[WritePlan] = []
    while plans and (
        len(plans) > PLANS_MAX or plans[0].total_bytes < plans[-1].total_bytes - PLANS_BYTES_MAX
    ):
        surplus.append(plans.popleft())
    return surplus
