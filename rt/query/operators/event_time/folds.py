"""How the values of a window become its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Fold:
    """`add(accumulated, value)` returns the new accumulated value, starting with `initial()`.

    - `add` may change `accumulated` and return it. Then `result` must copy it, if late values are allowed.
      It must raise before it changes it.
    - `merge(first, second)` joins those of two sessions, the earlier first. It must not change them, because
      the sessions stay as they are if the value that joins them is left out. `check_values` finds that.
    - `result(accumulated)` is what the window emits.
    - What is accumulated must be storable (`rt.objects.ANY`).
    - The values of several sources come in any order: the result is the same if `add` does not depend on it.
    """

    initial: Callable[[], Any]
    add: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any] | None = None
    result: Callable[[Any], Any] = _same

    @classmethod
    def count(cls) -> Self:
        """The number of values."""
        return cls(int, lambda count, _: count + 1, lambda first, second: first + second)

    @classmethod
    def sum(cls, of: Callable[[Any], Any] = _same) -> Self:
        """The sum of `of(value)`. The last digits of a sum of floats depend on the order."""
        return cls(int, lambda total, value: total + of(value), lambda first, second: first + second)

    @classmethod
    def to_list(cls, of: Callable[[Any], Any] = _same) -> Self:
        """A list of `of(value)`, in the order of arrival."""
        return cls(list, lambda values, value: [*values, of(value)], lambda first, second: first + second)
