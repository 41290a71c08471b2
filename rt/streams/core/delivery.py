"""The options of a registration: how one consumer gets its events."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct

from rt.errors import InvalidOption

PoisonPolicy: TypeAlias = Literal["dead-letter", "fault", "block"]
"""What happens to an event that its consumer does not accept.

`dead-letter`: it goes to the provider's dead letters, and the consumer continues after it. `fault`: the
subscription stops until it is resumed, with that event first. `block`: it is retried indefinitely.
"""


class DeliveryOptions(Struct, frozen=True):
    """The options of one registration. None: the default of the provider. `rt.InvalidOption` for invalid
    values.
    """

    on_poison: PoisonPolicy | None = None
    where: Callable[[Any], object] | None = None
    """Only events for which it returns a true value are delivered. None: all."""
    batch_size: int | None = None
    """The maximum number of events in one delivery."""
    batch_within_s: float | None = None
    """How long a smaller batch waits for more events, in seconds. None: it does not wait."""

    def __post_init__(self) -> None:
        check_policy(self.on_poison)
        where: object = self.where
        if where is not None and (not callable(where) or inspect.iscoroutinefunction(where)):
            raise InvalidOption(
                "not a filter", where="where", got=repr(where)[:200], expected="a plain function"
            )
        size: object = self.batch_size
        if size is not None and not (isinstance(size, int) and size >= 1):
            raise InvalidOption("not a size", where="batch_size", got=size, expected="a number from 1 on")
        within_s = self.batch_within_s
        if within_s is not None and not 0 < within_s < math.inf:
            raise InvalidOption(
                "not a time", where="batch_within_s", got=within_s, expected="seconds, more than 0"
            )

    def over(self, other: DeliveryOptions) -> DeliveryOptions:
        """Return these options, with unset fields taken from `other`."""
        return DeliveryOptions(
            other.on_poison if self.on_poison is None else self.on_poison,
            other.where if self.where is None else self.where,
            other.batch_size if self.batch_size is None else self.batch_size,
            other.batch_within_s if self.batch_within_s is None else self.batch_within_s,
        )


def check_events(events: Iterable[Any]) -> list[Any]:
    """Return the events of a call that publishes, as a list. `rt.InvalidOption` if a single event is given,
    such as a string: its characters are not events.
    """
    if isinstance(events, Mapping | str | bytes | bytearray | memoryview) or not isinstance(events, Iterable):
        raise InvalidOption(
            "not a series of events", where="events", got=type(events).__name__, expected="a list of events"
        )
    return list(events)


def check_policy(policy: PoisonPolicy | None) -> PoisonPolicy | None:
    """Return `policy`. `rt.InvalidOption` if there is no such policy."""
    if policy is not None and policy not in get_args(PoisonPolicy):
        raise InvalidOption(
            "unknown policy", where="on_poison", got=policy, expected=" | ".join(get_args(PoisonPolicy))
        )
    return policy
