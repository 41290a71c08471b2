"""The consumers of this host: by subscription, by name, and for every stream of a pattern.

They outlive the agents: a queue that returns to this host finds them here.
"""

from __future__ import annotations

import re
from fnmatch import translate

from rt.names import check_name
from rt.streams.agent.subscription_store import SubscriptionRecord
from rt.streams.core.stream_id import StreamId
from rt.streams.observer import ObserverFactory, StreamObserver


class ConsumerFactories:
    """The consumers of one provider on one host."""

    def __init__(self) -> None:
        self._attached: dict[str, StreamObserver] = {}
        self._factories: dict[str, ObserverFactory] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], ObserverFactory]] = {}

    def add_factory(self, name: str, factory: ObserverFactory) -> None:
        """Use `factory` for subscriptions of consumer `name`. `ValueError` if the name is taken."""
        if self._factories.setdefault(check_name(name, kind="consumer"), factory) is not factory:
            raise ValueError(f"consumer {name!r} is already registered")

    def add_pattern(self, name: str, pattern: str, factory: ObserverFactory) -> None:
        """Give every stream whose topic matches a subscription. `ValueError` if the name is taken."""
        if check_name(name, kind="subscription") in self._patterns:
            raise ValueError(f"implicit subscription {name!r} is already registered")
        self._patterns[name] = (re.compile(translate(pattern)), factory)

    def attach(self, subscription_id: str, observer: StreamObserver) -> None:
        """Use this observer for the subscription, also after its queue returns to this host."""
        self._attached[subscription_id] = observer

    def detach(self, subscription_id: str) -> None:
        self._attached.pop(subscription_id, None)

    def has_pattern(self, name: str) -> bool:
        return name in self._patterns

    def patterns_of(self, stream: StreamId) -> list[str]:
        """The names of the implicit subscriptions of a stream."""
        return [name for name, (pattern, _) in self._patterns.items() if pattern.fullmatch(stream.topic)]

    def observer(self, record: SubscriptionRecord) -> StreamObserver | None:
        """The observer on this host; None if there is none. Raises what a factory raises."""
        attached = self._attached.get(record.id)
        if attached is not None:
            return attached
        factory: ObserverFactory | None = None
        if record.pattern is not None:
            factory = self._patterns[record.pattern][1] if record.pattern in self._patterns else None
        elif record.consumer is not None:
            factory = self._factories.get(record.consumer)
        return None if factory is None else factory(record.stream)
