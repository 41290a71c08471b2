"""The timers of one operator, and where they are saved.

The first few timers are in the operator's part of its group's row. Most operators have no more timers, and
these need no rows of their own. Every further timer is an entry of a dictionary in the object space. Each
entry is one row. So the cost of a checkpoint depends on the changes, not on the number of timers. A timer
stays where it was first stored until it fires or is cancelled.

The order of timers with equal times is saved with each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from rt.objects import PersistedDictionary
from rt.query.core.row_json import plain

if TYPE_CHECKING:
    from typing import Any

    from rt.query.core.operator import Operator
    from rt.query.core.scheduler import Timer

IN_ROW_MAX: Final = 8
"""Maximum number of timers of one operator in its group's row. It is small, because each change writes all of
them.
"""

OBJECT: Final = "@timers"
"""Name of the dictionary: by key, the time, when it was set, and a number (see `Timer.order`)."""


class OperatorTimers:
    """Sets, fires and saves timers. `Operator` describes what its methods do."""

    __slots__ = ("_in_space", "_operator", "_timers")

    def __init__(self, operator: Operator[Any, Any]) -> None:
        self._operator: Final = operator
        self._timers: dict[str, Timer] = {}
        self._in_space: PersistedDictionary[str, list[int]] | None = None

    @classmethod
    def load(cls, operator: Operator[Any, Any], in_row: list[list[Any]]) -> OperatorTimers | None:
        """The saved timers; None if there are none. They are scheduled."""
        has_object = f"{operator.address}#{OBJECT}" in operator._group.runtime.space
        if not in_row and not has_object:
            return None
        self = cls(operator)
        saved: dict[str, Iterable[int]] = {key: of for key, *of in in_row}
        if has_object:
            saved |= self._open().items()
        fire = self._fire
        timers = (
            (partial(fire, key), due_ns, set_ns, number) for key, (due_ns, set_ns, number) in saved.items()
        )
        made = operator._group.runtime.scheduler.restore_timers(timers)
        self._timers = dict(zip(saved, made, strict=True))
        return self

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, key: str) -> bool:
        return key in self._timers

    def set(self, key: str, due_ns: int) -> None:
        before = self._timers.pop(key, None)
        if before is not None:
            before.cancel()
        scheduler, now_ns = self._operator._group.runtime.scheduler, self._operator.now_ns
        timer = scheduler.at(due_ns, partial(self._fire, key), set_ns=now_ns)
        if self._is_in_row(key, is_new=before is None):
            self._operator.changed()
        else:
            try:
                self._open()[key] = [due_ns, *timer.order]
            except BaseException:
                timer.cancel()
                raise
        self._timers[key] = timer

    def cancel(self, key: str) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
            self._forget(key)

    def release(self) -> None:
        """Cancel all timers. The stored timers stay."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers = {}

    def save(self) -> list[list[Any]]:
        """The timers of the group's row."""
        stored = self._in_space or ()
        return [
            [plain(key), each.due_ns, *each.order] for key, each in self._timers.items() if key not in stored
        ]

    def _fire(self, key: str) -> None:
        del self._timers[key]
        self._forget(key)
        group = self._operator._group
        if group.root.rank is None:
            self._call(key)
        else:
            group.runtime.turns.collect(partial(self._call, key))

    def _call(self, key: str) -> None:
        try:
            self._operator.on_timer(key)
        except Exception as error:  # noqa: BLE001 - any error of an operator concerns only its query
            self._operator._group.crash(error, self._operator)

    def _forget(self, key: str) -> None:
        if self._in_space is not None and key in self._in_space:
            del self._in_space[key]
        else:
            self._operator.changed()

    def _is_in_row(self, key: str, *, is_new: bool) -> bool:
        if self._in_space is None or key not in self._in_space:
            return not is_new or len(self._timers) - len(self._in_space or ()) < IN_ROW_MAX
        return False

    def _open(self) -> PersistedDictionary[str, list[int]]:
        if self._in_space is None:
            self._in_space = self._operator.objects.dictionary(OBJECT)
        return self._in_space
