"""Sends the values of a stage to the queries and stages that read all of them, or those of one key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import chain
from typing import Any, Final, cast

from rt.objects.core.typed_json import key_of
from rt.query.core.errors import InvalidKey, WrongState
from rt.query.core.source import EVERY_KEY, SourceTap, TapList, ValueFeed
from rt.query.core.subject import Subject
from rt.query.operators.user_functions import FAILED, UserFunctionOperator
from rt.query.turns import Turns

KeyOf = Callable[[Any], Hashable]


class StageFeed(ValueFeed):
    """The values of one stage. They have no ids, so the watermark stays as it is."""

    def __init__(self, name: str, turns: Turns, *, rank: int, has_keys: bool) -> None:
        super().__init__(name, turns)
        self.rank = rank
        self.has_keys = has_keys
        self.sent = 0
        """Number of values that the stage sent, in this run of the engine."""
        self._routes: Final[dict[Hashable, TapList]] = {}

    def normal_key(self, key: Hashable) -> Hashable:
        return cast(Hashable, key_of(key))

    def send(self, value: Any, key: Hashable) -> None:
        """Let the taps that read this key, or all keys, process the value."""
        self._turns.collect(partial(self._route, value, key))
        self.sent += 1

    def detach(self, tap: SourceTap) -> None:
        super().detach(tap)
        if tap.rank is None and tap.key is not EVERY_KEY and not self._routes[tap.key].count:
            del self._routes[tap.key]

    def _route(self, value: Any, key: Hashable) -> None:
        # The lookup is first, because it may raise. Then nothing was sent.
        route = self._routes.get(key)
        if self._stage_steps:
            steps = self._steps_of_stages(key)
            for step in steps if key is EVERY_KEY else chain(self._steps_of_stages(EVERY_KEY), steps):
                self._turns.add_for_stage(step, value)
        self._turns.add_for_queries(self._taps.steps(), value)
        if route is not None:
            self._turns.add_for_queries(route.steps(), value)

    def _taps_of(self, key: Hashable) -> TapList:
        return self._taps if key is EVERY_KEY else self._routes.setdefault(key, TapList())

    def _tap_lists(self) -> list[TapList]:
        return [self._taps, *self._routes.values()]


class StageOutput(UserFunctionOperator[Any, Any]):
    """The last operator of a stage: finds the key of each value, and sends it to the feed."""

    __slots__ = ("_feed", "_key_of")
    NAME = "stage"

    def __init__(self, feed: StageFeed, key_of: KeyOf | None) -> None:
        self._feed: Final = feed
        self._key_of: Final = None if key_of is None else partial(_key, key_of, feed.name)

    def on_next(self, value: Any, /) -> None:
        if isinstance(value, Subject):
            hint = "Let the stage emit the results of its windows and groups: add flat_map to it."
            self.fail(WrongState("a stage emits a window or group", where=self._feed.name, hint=hint))
            return
        key = EVERY_KEY if self._key_of is None else self.call(self._key_of, value)
        if key is not FAILED:
            self._feed.send(value, key)


def _key(find: KeyOf, name: str, value: Any) -> Hashable:
    key = find(value)
    try:
        hash(key)
    except TypeError as error:
        hint = "Let key_of return a text, a number or a tuple of these."
        raise InvalidKey(
            str(error), where=f"key_of of stage {name!r}", got=repr(key)[:200], hint=hint
        ) from error
    return cast(Hashable, key_of(key))
