"""The operator that splits its values into groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.objects import PersistedDictionary
from rt.query.core.observable import Transform, applied
from rt.query.operators.user_functions import FAILED, key_of
from rt.query.operators.windows import SubjectOwner


def group_by(
    key_mapper: Callable[[Any], Any], element_mapper: Callable[[Any], Any] | None = None
) -> Transform:
    """For every key a group, emitted at its first value. It sends `element_mapper(value)`.

    A group has its `key`, and must be subscribed to immediately, as `flat_map` does. Groups end with the
    source. Saves the keys, in the object space.
    """
    return applied(GroupBy, key_mapper, element_mapper)


class GroupBy(SubjectOwner):
    """Groups are named by numbers, in the order of their first values."""

    __slots__ = ("_element_mapper", "_key_mapper", "_names")

    NAME = "group_by"

    def __init__(self, key_mapper: Callable[[Any], Any], element_mapper: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self._key_mapper: Final = key_mapper
        self._element_mapper: Final = element_mapper
        self._names: PersistedDictionary[Any, str]

    def on_open(self) -> None:
        self._names = self.objects.dictionary("keys")

    def on_next(self, value: Any, /) -> None:
        key = key_of(self.call(self._key_mapper, value))
        if key is FAILED or (name := self.call(self._names.get, key)) is FAILED:
            return
        if name is None:
            if self._is_unsubscribed:
                return
            name = self._names[key] = str(len(self._names))
            self.open_inner(name, key)
        element = value if self._element_mapper is None else self.call(self._element_mapper, value)
        if not self.is_disposed:
            self._subjects[name].on_next(element)

    def save_state(self) -> bool:
        return self._is_unsubscribed

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        self._is_unsubscribed = state
        for key, name in self._names.items():
            self.reopen_inner(name, key)
