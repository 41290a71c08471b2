"""An operator whose function is a coroutine function: it may wait, for example for a service.

The values in flight are in the object space, so a crash loses none: the function is called again for them. A
result is emitted once, and then its value is no longer saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from rt.objects import NotSerializable, PersistedDictionary, PersistedSortedDictionary
from rt.query.async_calls import AsyncCall, AsyncFunction, Call, Outcome
from rt.query.core.observable import Transform, applied
from rt.query.core.operator import Operator
from rt.query.core.scheduler import NS_PER_S, Duration
from rt.query.operators.user_functions import check_least, period_ns


def map_async(
    function: AsyncFunction, *, concurrency: int = 16, ordered: bool = True, timeout: Duration | None = None
) -> Transform:
    """`await function(value)` for every value, in the order of the values, or if not `ordered` as they come.

    The function runs in the engine's event loop, in another thread, up to `concurrency` times at once. With
    `concurrency` values in flight, or finished but waiting for an earlier one, the engine refuses its sources
    (`Backlogged`). A call that takes longer than `timeout` fails with `rt.Timeout`. The function is called at
    least once for each value: again after a crash, unless a checkpoint holds its result. The error policy
    "retry" calls it again without blocking the engine. In order, results must be values that can be saved.
    Saves the values in flight, and the results that wait for an earlier one, in the object space.
    """
    check_least("map_async", "concurrency", concurrency, 1)
    timeout_s = None if timeout is None else period_ns("map_async", timeout) / NS_PER_S
    return applied(MapAsync, AsyncCall(function, timeout_s), concurrency, ordered)


class MapAsync(Operator[Any, Any]):
    """Values in flight have numbers in the order of their arrival. Values without a started call wait.

    If the operator is ordered, a result that must wait for an earlier result is saved. An error that must
    wait is not saved: after a crash the function is called again.
    """

    __slots__ = (
        "_concurrency",
        "_errors",
        "_is_done",
        "_is_ordered",
        "_request",
        "_results",
        "_retries",
        "_running",
        "_values",
        "_waiting",
    )
    NAME = "map_async"
    SAVED = "_is_done"

    def __init__(self, request: AsyncCall, concurrency: int, is_ordered: bool) -> None:
        self._request: Final = request
        self._concurrency: Final = concurrency
        self._is_ordered: Final = is_ordered
        self._is_done = False
        self._values: PersistedSortedDictionary[int, Any]
        self._results: PersistedDictionary[int, Any]
        self._errors: Final[dict[int, Exception]] = {}
        self._retries: Final[dict[int, int]] = {}
        self._running: Final[dict[int, Call]] = {}
        self._waiting: Final[deque[int]] = deque()

    def on_open(self) -> None:
        self._values = self.objects.sorted_dictionary("values", keys=int)
        self._results = self.objects.dictionary("results", keys=int)

    def on_connect(self) -> None:
        """Call the function again for the saved values without a saved result."""
        self._waiting.extend(number for number in self._values if number not in self._results)
        self._start_calls()

    def on_next(self, value: Any, /) -> None:
        number = self._values.max() + 1 if self._values else 0
        self._values[number] = value
        self._waiting.append(number)
        self._start_calls()

    def on_completed(self) -> None:
        self._is_done = True
        self.changed()
        self._complete_if_done()

    def can_skip(self) -> bool:
        """Always true: after a value that is left out, other values or the end follow."""
        return True

    def on_dispose(self) -> None:
        calls = self._group.runtime.calls
        calls.set_full(f"{self.NAME}@{self.address}", is_full=False)
        for call in self._running.values():
            call.cancel()

    def _start_calls(self) -> None:
        calls = self._group.runtime.calls
        held = len(self._results) + len(self._errors)
        # If no call runs, the first value is called even above the limit. A checkpoint of a higher
        # concurrency may hold more results, and these results wait for the first value.
        while self._waiting and (not self._running or len(self._running) + held < self._concurrency):
            self._start_call(self._waiting.popleft())
        is_full = len(self._values) >= self._concurrency
        calls.set_full(f"{self.NAME}@{self.address}", is_full=is_full)

    def _start_call(self, number: int, after_s: float = 0.0) -> None:
        on_finished = partial(self._group.guard, self._finish, number)
        calls, value = self._group.runtime.calls, self._values[number]
        self._running[number] = calls.start(self._request, value, on_finished, after_s=after_s)

    def _finish(self, number: int, outcome: Outcome) -> None:
        """Emit the result, or hold it until it is its turn."""
        del self._running[number]
        if outcome.error is not None and self._retry(number):
            return
        self._retries.pop(number, None)
        if self._is_ordered:
            self._hold(number, outcome)
            ready = list(self._take_ready())
        else:
            ready = [(self._values.pop(number), outcome)]
        self._start_calls()
        for value, each in ready:
            if self.is_disposed:
                return
            self._send(value, each)
        self._complete_if_done()

    def _retry(self, number: int) -> bool:
        """Call the function again, if the query's error policy says so."""
        errors = self._group.root.errors
        made = self._retries.get(number, 0)
        if errors is None or made >= errors.retries:
            return False
        self._retries[number] = made + 1
        self._start_call(number, errors.pause_s)
        return True

    def _send(self, value: Any, outcome: Outcome) -> None:
        runtime = self._group.runtime
        runtime.called_with = value
        try:
            if outcome.error is not None:
                self.reject(outcome.error)
            else:
                self.emit(outcome.result)
        finally:
            runtime.called_with = None

    def _hold(self, number: int, outcome: Outcome) -> None:
        error = outcome.error
        if error is None:
            try:
                self._results[number] = outcome.result
            except NotSerializable as refused:
                error = refused
        if error is not None:
            self._errors[number] = error

    def _take_ready(self) -> Iterator[tuple[Any, Outcome]]:
        """Remove the leading values that have outcomes, and yield each value with its outcome."""
        while self._values:
            number = self._values.min()
            if number in self._results:
                outcome = Outcome(self._results.pop(number))
            elif number in self._errors:
                outcome = Outcome(error=self._errors.pop(number))
            else:
                return
            yield self._values.pop(number), outcome

    def _complete_if_done(self) -> None:
        if self._is_done and not self.is_disposed and not self._values:
            self.complete()
