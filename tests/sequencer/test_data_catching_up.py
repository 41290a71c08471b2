"""When a node's merged log is copied from the others: when what it waits for is on nobody's way to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from replicator.items import Place
from sequencer.data import catching_up
from sequencer.data.catching_up import STUCK_S, CatchingUp
from sequencer.data.merger import Missing

SEGMENT = Place(0, 0, 0).segment
END = 10_000


class CaughtUp(Exception):
    """It is copied from the others now."""


@dataclass
class Node:
    """A node whose merger waits for input; each look of `CatchingUp` is a second later than the last."""

    looks: int = 0
    place: Place | None = None
    has_stream: bool = True
    moves_until: int = 0
    """At each look before that one the stream has brought more."""

    @property
    def merger(self) -> Any:
        self.looks += 1
        if self.place is not None and self.looks < self.moves_until:
            self.place = self.place._replace(offset=self.place.offset + 8)
        return SimpleNamespace(failure=None, damage=None, gap=None, missing=Missing(1, SEGMENT, END))

    def get(self, _session_id: int) -> Any:
        return SimpleNamespace(receiver=self, has_stream=self.has_stream)

    async def play(self) -> int:
        """The look at which it is copied."""
        config = SimpleNamespace(
            merged_directory="", stream="", peers=["b"], members={"b": SimpleNamespace(data="b:1")}
        )
        watcher = CatchingUp(config, None, None, None, self, self, {}, lambda _: None)  # type: ignore[arg-type]
        watcher._loop = SimpleNamespace(time=lambda: float(self.looks))  # type: ignore[assignment]

        async def caught_up(_merger: object) -> None:
            raise CaughtUp

        watcher.catch_up = caught_up  # type: ignore[assignment,method-assign]
        with pytest.raises(CaughtUp):
            await asyncio.wait_for(watcher.run(), 60)
        return self.looks


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catching_up, "LOOK_S", 0)


@pytest.mark.parametrize(
    ("node", "copied_at"),
    [
        pytest.param(Node(), 1 + STUCK_S, id="nobody sends"),
        pytest.param(Node(place=Place(0, 0, 64), moves_until=50), 49 + STUCK_S, id="a stream that stops"),
        pytest.param(Node(place=Place(0, 0, 64)), 1 + STUCK_S, id="a stream that brings nothing"),
        pytest.param(Node(place=Place(0, 0, 64), has_stream=False, moves_until=50), 1 + STUCK_S, id="ended"),
        pytest.param(Node(place=Place(0, 1, 64), moves_until=50), 1 + STUCK_S, id="it brings what is behind"),
    ],
)
def test_the_merged_log_is_copied_once_no_stream_brings_what_is_missing(node: Node, copied_at: float) -> None:
    assert asyncio.run(node.play()) == copied_at
