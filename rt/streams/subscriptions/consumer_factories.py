"""The consumers of a host: by subscription, by name, and for every stream of a pattern."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import Final

from msgspec import Struct

from rt.errors import InvalidOption
from rt.names import check_name
from rt.streams.core.delivery import DeliveryOptions
from rt.streams.core.stream_id import StreamId
from rt.streams.observer import ObserverFactory, StreamObserver
from rt.streams.subscriptions.start_place import CheckedStart, Start, check_start
from rt.streams.subscriptions.subscription_store import SubscriptionRecord

_AS_OPTIONS: Final = DeliveryOptions()


class ImplicitSubscription(Struct, frozen=True):
    """The subscription of every stream with a topic that matches `pattern`. If `start` is None, the start in
    the options is used.
    """

    pattern: re.Pattern[str]
    factory: ObserverFactory
    delivery: DeliveryOptions
    start: CheckedStart | None


class ConsumerFactories:
    """The factories outlive the agents: when a queue returns to this host, it finds them here."""

    def __init__(self) -> None:
        self._attached: dict[str, tuple[StreamObserver, DeliveryOptions]] = {}
        self._factories: dict[str, tuple[ObserverFactory, DeliveryOptions]] = {}
        self._patterns: dict[str, ImplicitSubscription] = {}

    def add_factory(
        self, name: str, factory: ObserverFactory, delivery: DeliveryOptions = _AS_OPTIONS
    ) -> None:
        """Use `factory` for subscriptions of consumer `name`. `ValueError` if the name is taken."""
        found = self._factories.setdefault(
            check_name(name, kind="consumer"), (_checked(factory, name), delivery)
        )
        if found != (factory, delivery):
            raise InvalidOption(f"consumer {name!r} is already registered")

    def add_pattern(
        self,
        name: str,
        pattern: str,
        factory: ObserverFactory,
        delivery: DeliveryOptions = _AS_OPTIONS,
        start: Start | None = None,
    ) -> None:
        """Give a subscription to every stream with a topic that matches `pattern`. `ValueError` if the name
        is taken.
        """
        if check_name(name, kind="subscription") in self._patterns:
            raise InvalidOption(f"implicit subscription {name!r} is already registered")
        if not isinstance(pattern, str):
            raise InvalidOption("not a pattern of topics", where=name, got=repr(pattern)[:200])
        checked = None if start is None else check_start(start)
        self._patterns[name] = ImplicitSubscription(
            re.compile(translate(pattern)), _checked(factory, name), delivery, checked
        )

    def attach(
        self, subscription_id: str, observer: StreamObserver, delivery: DeliveryOptions = _AS_OPTIONS
    ) -> None:
        """Use this observer for the subscription, also after its queue returns to this host."""
        self._attached[subscription_id] = observer, delivery

    def detach(self, subscription_id: str) -> None:
        self._attached.pop(subscription_id, None)

    def has_pattern(self, name: str) -> bool:
        return name in self._patterns

    def starts(self) -> dict[str, CheckedStart | None]:
        """Where each implicit subscription starts."""
        return {name: each.start for name, each in self._patterns.items()}

    def has_consumer(self, record: SubscriptionRecord) -> bool:
        """Whether this host has an observer for the subscription, or can make one."""
        is_known = record.pattern in self._patterns if record.pattern else record.consumer in self._factories
        return is_known or record.id in self._attached

    def patterns_of(self, stream: StreamId) -> list[str]:
        """The names of the implicit subscriptions of a stream."""
        return [name for name, each in self._patterns.items() if each.pattern.fullmatch(stream.topic)]

    def observer(self, record: SubscriptionRecord) -> StreamObserver | None:
        """The observer on this host; None if there is none. Raises what a factory raises."""
        attached = self._attached.get(record.id)
        if attached is not None:
            return attached[0]
        factory: ObserverFactory | None = None
        if record.pattern is not None:
            factory = self._patterns[record.pattern].factory if record.pattern in self._patterns else None
        elif record.consumer in self._factories:
            factory = self._factories[record.consumer][0]
        return None if factory is None else factory(record.stream)

    def delivery(self, record: SubscriptionRecord) -> DeliveryOptions:
        """The delivery options of the subscription on this host."""
        attached = self._attached.get(record.id)
        return self.registered(record) if attached is None else attached[1]

    def registered(self, record: SubscriptionRecord) -> DeliveryOptions:
        """The options of its pattern, or of its consumer's factory."""
        if record.pattern is not None:
            known = self._patterns.get(record.pattern)
            return _AS_OPTIONS if known is None else known.delivery
        return self._factories[record.consumer][1] if record.consumer in self._factories else _AS_OPTIONS


def _checked(factory: ObserverFactory, name: str) -> ObserverFactory:
    if not callable(factory):
        raise InvalidOption(
            "not a factory of observers",
            where=name,
            got=repr(factory)[:200],
            expected="a class, or a function of the stream",
        )
    return factory
