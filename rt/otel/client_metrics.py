"""The counters of clients as metrics."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from opentelemetry import metrics

import rt.aio
import rt.client.publisher
import rt.client.subscriber
from rt.errors import Closed
from rt.otel.spans import attributes_of

Client: TypeAlias = (
    rt.client.publisher.Publisher | rt.client.subscriber.Subscriber | rt.aio.Publisher | rt.aio.Subscriber
)


class Instrument(NamedTuple):
    """A metric: `field` is one of `PublisherStats` or `SubscriberStats`."""

    name: str
    unit: str
    field: str
    description: str
    is_gauge: bool = False


_MESSAGES: Final = "{message}"

OF_PUBLISHERS: Final = (
    Instrument(
        "messaging.client.sent.messages",
        _MESSAGES,
        "replicated",
        "Messages that a majority of nodes has.",
    ),
    Instrument("rt.client.published.messages", _MESSAGES, "messages", "Messages that publish accepted."),
    Instrument("rt.client.published.size", "By", "bytes", "Bytes of their values."),
    Instrument("rt.client.synced.messages", _MESSAGES, "synced", "Messages synced to the local disk."),
    Instrument("rt.client.merged.messages", _MESSAGES, "merged", "Messages that are merged."),
    Instrument(
        "rt.client.waiting.messages", _MESSAGES, "waiting_messages", "Messages not merged yet.", is_gauge=True
    ),
    Instrument("rt.client.waiting.size", "By", "waiting_bytes", "Their bytes on the disk.", is_gauge=True),
    Instrument("rt.client.disconnects", "{disconnect}", "disconnects", "Lost connections to nodes."),
    Instrument("rt.client.problems", "{problem}", "problems", "Problems that blocked replication."),
)
OF_SUBSCRIBERS: Final = (
    Instrument("messaging.client.consumed.messages", _MESSAGES, "messages", "Messages that were delivered."),
    Instrument("rt.client.consumed.size", "By", "bytes", "Bytes of their values."),
    Instrument("rt.client.position", _MESSAGES, "position", "The next position to deliver.", is_gauge=True),
    Instrument("rt.client.lag", _MESSAGES, "lag", "Positions up to the end of the log.", is_gauge=True),
    Instrument("rt.client.gaps", "{gap}", "gaps", "Reports of messages that were not delivered."),
    Instrument("rt.client.missing.messages", _MESSAGES, "missing", "Their positions, as far as known."),
)


class ClientInstruments:
    """The instruments of one meter provider, and the clients that they observe."""

    def __init__(self, provider: metrics.MeterProvider) -> None:
        self._publishers = weakref.WeakSet[Any]()
        self._subscribers = weakref.WeakSet[Any]()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        meter = provider.get_meter("rt")
        for clients, instruments in (
            (self._publishers, OF_PUBLISHERS),
            (self._subscribers, OF_SUBSCRIBERS),
        ):
            for one in instruments:
                create: Callable[..., object] = (
                    meter.create_observable_gauge if one.is_gauge else meter.create_observable_counter
                )
                callback = partial(self._observe, clients, one.field)
                create(one.name, [callback], unit=one.unit, description=one.description)

    def add(self, client: Client) -> None:
        is_publisher = isinstance(client, rt.client.publisher.Publisher | rt.aio.Publisher)
        with self._lock:
            (self._publishers if is_publisher else self._subscribers).add(client)

    def _observe(
        self, clients: weakref.WeakSet[Any], field: str, _: metrics.CallbackOptions
    ) -> Iterator[metrics.Observation]:
        if os.getpid() != self._pid:
            return  # A forked child: the clients are the parent's, and a lock may be held.
        with self._lock:
            found = list(clients)
        for client in found:
            try:
                value = getattr(client.stats(), field)
                is_publisher = clients is self._publishers
                name = client.session if is_publisher else client.name
            except Closed:  # An `rt.aio` client that is not open yet.
                continue
            if value is not None:
                operation = "publish" if is_publisher else "receive"
                yield metrics.Observation(value, attributes_of(operation, client.stream, name))


_observers: weakref.WeakKeyDictionary[metrics.MeterProvider, ClientInstruments] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


def observe(client: Client, *, meter_provider: metrics.MeterProvider | None = None) -> None:
    """Report what `client.stats()` counts as metrics, as long as `client` exists.

    `client` is a publisher or subscriber, also of `rt.aio`. `meter_provider` defaults to that of the program,
    which must be set before.
    """
    provider = metrics.get_meter_provider() if meter_provider is None else meter_provider
    with _lock:
        observer = _observers.get(provider)
        if observer is None:
            observer = _observers[provider] = ClientInstruments(provider)
    observer.add(client)
