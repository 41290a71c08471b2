"""Groups that end before their source, so that a query that always receives new keys stays small."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final

from rt.objects import PersistedDictionary
from rt.objects.core.typed_json import key_of
from rt.query.core.observable import Observable, Transform, applied
from rt.query.core.subject import Subject
from rt.query.operators.user_functions import FAILED, storable
from rt.query.operators.windows import SubjectOwner


def group_by_until(
    key_mapper: Callable[[Any], Any],
    element_mapper: Callable[[Any], Any] | None,
    duration_mapper: Callable[[Any], Observable[Any]],
) -> Transform:
    """As `group_by`; a group ends when `duration_mapper(group)` emits or ends.

    The next value with its key starts a new group. `duration_mapper` is called again after a crash, and must
    return the same. Saves the keys of the open groups, in the object space.
    """
    return applied(GroupByUntil, key_mapper, element_mapper, duration_mapper)


class GroupByUntil(SubjectOwner):
    """Groups are named by numbers. Duration mappers get a separate subject.

    So the operator knows whether a group has subscribers other than its duration. The inner subscription of a
    duration has the name of the group.
    """

    __slots__ = ("_duration_mapper", "_durations", "_element_mapper", "_key_mapper", "_numbers")
    NAME = "group_by_until"

    def __init__(
        self,
        key_mapper: Callable[[Any], Any],
        element_mapper: Callable[[Any], Any] | None,
        duration_mapper: Callable[[Any], Observable[Any]],
    ) -> None:
        super().__init__()
        self._key_mapper: Final = key_mapper
        self._element_mapper: Final = element_mapper
        self._duration_mapper: Final = duration_mapper
        self._durations: Final[dict[str, Subject]] = {}
        self._numbers: PersistedDictionary[Any, int]

    def on_open(self) -> None:
        self._numbers = self.objects.dictionary("keys", values=int)

    def on_next(self, value: Any, /) -> None:
        key = key_of(self.call(self._key_mapper, value))
        if key is FAILED or (number := self.call(self._numbers.get, key)) is FAILED:
            return
        if number is None and self._is_unsubscribed:
            return
        element = value if self._element_mapper is None else self.call(self._element_mapper, value)
        if element is FAILED:
            return
        if number is None:
            number = self._children_made
            if not self._open(number, storable(key)):
                return
        for inner in (self._subjects[str(number)], self._durations[str(number)]):
            inner.on_next(element)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        made = self._duration_mapper(self._durations[key])
        if not isinstance(made, Observable):
            raise TypeError(f"group_by_until: the duration mapper must return an observable, got {made!r}")
        return made

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.close_child(key)
        self._end_group(key)

    def on_inner_completed(self, key: str, /) -> None:
        self._end_group(key)

    def on_dispose(self) -> None:
        super().on_dispose()
        for inner in self._durations.values():
            inner.drop()

    def save_state(self) -> bool:
        return self._is_unsubscribed

    def load_state(self, state: Any, version: int, /) -> None:
        self._is_unsubscribed = state
        for key, number in sorted(self._numbers.items(), key=itemgetter(1)):
            self.reopen_inner(str(number), key)

    def reopen_inner(self, name: str, key: Any = None) -> None:
        super().reopen_inner(name, key)
        self._durations[name] = self.make_inner(f"{name}-duration", key)

    def _open(self, number: int, key: Any) -> bool:
        """Open a group. False if its duration mapper failed, or the operator has ended: then there is no
        group.
        """
        name = str(number)
        self.reopen_inner(name, key)
        with self._durations[name].handed_out():
            made = self.call(self.open_child, name)
        if made is FAILED:
            for inner in (self._subjects.pop(name), self._durations.pop(name)):
                inner.drop()
            return False
        self._numbers[key] = number
        self.hand_out(self._subjects[name])
        return not self.is_disposed

    def _end_group(self, name: str) -> None:
        inner = self._subjects.pop(name)
        del self._numbers[inner.key]
        self._durations.pop(name).drop()
        inner.on_completed()
        self._end_if_idle()
