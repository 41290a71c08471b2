"""Subscribers of a real cluster receive every published message while nodes are killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from faults import WAIT_S, Faults

import rt
import rt.aio

pytestmark = pytest.mark.slow


def take(subscriber: rt.Subscriber, count: int) -> list[bytes]:
    values: list[bytes] = []
    while len(values) < count:
        messages = subscriber.poll(count - len(values), WAIT_S)
        assert messages, len(values)
        values += [message.value for message in messages]
    return values


def test_subscriber_receives_all_messages_in_order_while_nodes_are_killed(
    faults: Faults, tmp_path: Path
) -> None:
    nodes = faults.nodes
    with (
        rt.Publisher(
            tmp_path / "out",
            "s",
            publisher_id="through",
            endpoints=nodes.endpoints,
            tls=nodes.certificate("publisher", "through"),
        ) as publisher,
        rt.Subscriber(
            tmp_path / "in",
            "s",
            endpoints=nodes.endpoints,
            tls=nodes.certificate("subscriber", "through"),
            connect_timeout=None,
            topics=["through"],
            name="through",
        ) as subscriber,
    ):
        sent: list[bytes] = []
        got: list[bytes] = []
        for name in nodes.running:
            values = [b"%s %d" % (name.encode(), number) for number in range(500)]
            publisher.publish_many(values, topic="through")
            sent += values
            got += take(subscriber, 100)
            nodes.kill(name)
            publisher.publish(b"meanwhile", topic="through")
            sent.append(b"meanwhile")
            got += take(subscriber, len(sent) - len(got))
            subscriber.ack(subscriber.position)
            nodes.start(name)
            nodes.wait_ready()
        assert got == sent


def test_aio_subscriber_receives_each_message_published_from_its_event_loop(
    faults: Faults, tmp_path: Path
) -> None:
    nodes = faults.nodes
    tls = nodes.certificate("subscriber", "loop")
    with rt.Publisher(
        tmp_path / "out",
        "s",
        publisher_id="loop",
        endpoints=nodes.endpoints,
        tls=nodes.certificate("publisher", "loop"),
    ) as publisher:

        async def main() -> list[bytes]:
            async with (
                asyncio.timeout(WAIT_S),
                rt.aio.Subscriber(
                    tmp_path / "in",
                    "s",
                    endpoints=nodes.endpoints,
                    tls=tls,
                    connect_timeout=None,
                    topics=["loop"],
                ) as subscriber,
            ):
                got: list[bytes] = []
                for number in range(20):
                    publisher.publish(b"%d" % number, topic="loop")
                    got.append((await anext(subscriber)).value)
                return got

        assert asyncio.run(main()) == [b"%d" % number for number in range(20)]
