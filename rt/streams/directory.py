"""Which consumers this host has: by subscription, by name, and for every stream of a pattern.

They outlive the agents: a queue that comes back to this host finds them here.
"""

from __future__ import annotations

import re
from fnmatch import translate

from rt.names import check_name
from rt.streams.ids import StreamId
from rt.streams.observing import ObserverFactory, StreamObserver
from rt.streams.registry import SubscriptionRecord


class Consumers:
    """Of one provider on one host."""

    def __init__(self) -> None:
        self._attached: dict[str, StreamObserver] = {}
        self._factories: dict[str, ObserverFactory] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], ObserverFactory]] = {}

    def add_factory(self, name: str, factory: ObserverFactory) -> None:
        """Subscriptions of that consumer are served by what `factory` makes. `ValueError` if there is one."""
        if self._factories.setdefault(check_name(name, kind="consumer"), factory) is not factory:
            raise ValueError(f"a consumer {name!r} is there already")

    def add_pattern(self, name: str, pattern: str, factory: ObserverFactory) -> None:
        """Every stream whose topic matches has a subscription. `ValueError` if the name is taken."""
        if check_name(name, kind="subscription") in self._patterns:
            raise ValueError(f"an implicit subscription {name!r} is there already")
        self._patterns[name] = (re.compile(translate(pattern)), factory)

    def attach(self, subscription_id: str, observer: StreamObserver) -> None:
        """That one is served by this observer, also when its queue has been away."""
        self._attached[subscription_id] = observer

    def detach(self, subscription_id: str) -> None:
        """It is over."""
        self._attached.pop(subscription_id, None)

    def has_pattern(self, name: str) -> bool:
        """Whether there is an implicit subscription of that name here."""
        return name in self._patterns

    def patterns_of(self, stream: StreamId) -> list[str]:
        """The implicit subscriptions that a stream has."""
        return [name for name, (pattern, _) in self._patterns.items() if pattern.fullmatch(stream.topic)]

    def observer(self, record: SubscriptionRecord) -> StreamObserver | None:
        """Who consumes it here; None: nobody. Raises what a factory raises."""
        attached = self._attached.get(record.id)
        if attached is not None:
            return attached
        factory: ObserverFactory | None = None
        if record.pattern is not None:
            factory = self._patterns[record.pattern][1] if record.pattern in self._patterns else None
        elif record.consumer is not None:
            factory = self._factories.get(record.consumer)
        return None if factory is None else factory(record.stream)
