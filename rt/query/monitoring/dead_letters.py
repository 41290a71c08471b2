"""Dead letters: the values that queries left out because an error was raised for them.

Invariants:
- A letter is part of the state: a checkpoint holds it together with the position of its source. So after a
  crash each value still has one letter for each query that left it out, as with any output.
- The last `KEPT` letters stay in the store. If the engine has an output for dead letters, all letters are
  values of this output.
"""

from __future__ import annotations

from reprlib import Repr
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from rt.objects import PersistedQueue
from rt.query.checkpoint.edge import OutputEdge
from rt.query.core.errors import error_text
from rt.query.core.runtime import QueryRuntime

KEPT: Final = 100
TEXT_MAX: Final = 1000
"""Maximum number of characters of an error, and of a value."""
_QUEUE: Final = "@dead-letters"


class DeadLetter(Struct, frozen=True):
    """A value that a query left out. The source's log has the value itself, at `sequence_id`."""

    query: str
    operator: str
    """The `NAME` of the operator; "output" if the output refused a result."""
    address: str
    """The operator's position in the query, which is the same in every run."""
    source: str | None
    """None if a timer fired, or a call of `map_async` finished. Then no value of a source was processed."""
    sequence_id: int | None
    time_ns: int
    """The time of the queries' clock."""
    error: str
    value: str
    """The value of the source or call as a shortened `repr`, at most about `TEXT_MAX` characters."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


class DeadLetters:
    """The dead letters of one engine. Called with its lock held."""

    def __init__(self, runtime: QueryRuntime) -> None:
        self._runtime: Final = runtime
        self._kept: PersistedQueue[Any] | None = None
        if _QUEUE in runtime.space:
            self._kept = runtime.space.get_or_create_queue(_QUEUE)
        self.output: OutputEdge | None = None
        self.count = 0
        """Number of letters in this run of the engine."""

    @property
    def last(self) -> list[DeadLetter]:
        """The last letters, oldest first."""
        return [DeadLetter(**row) for row in self._kept or ()]

    def add(self, query_id: str, operator: str, address: str, error: Exception) -> DeadLetter:
        """Keep a letter about the value that is being processed. Raises what the output's `encode` raises."""
        source, sequence_id, value = self._runtime.processing()
        letter = DeadLetter(
            query_id,
            operator,
            address,
            source,
            sequence_id,
            self._runtime.scheduler.now_ns,
            cut(error_text(error)),
            "" if source is None and value is None else shown(value),
        )
        if self.output is not None:
            self.output.on_next(letter)
        if self._kept is None:
            self._kept = self._runtime.space.get_or_create_queue(_QUEUE)
        self._kept.enqueue(letter.row())
        while len(self._kept) > KEPT:
            self._kept.dequeue()
        self.count += 1
        return letter


class _Shown(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 5
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 30
        self.maxstring = self.maxlong = self.maxother = TEXT_MAX


_shown: Final = _Shown()


def shown(value: Any) -> str:
    """The value as text. Its cost does not depend on the length of a text, bytes or message."""
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:TEXT_MAX]) + ("…" if len(value) > TEXT_MAX else "")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return f"{type(value).__name__}({', '.join(f'{name}={shown(each)}' for name, each in fields)})"
    try:
        return cut(_shown.repr(value))
    except Exception as error:  # noqa: BLE001 - a user's class; the letter matters more than this text
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"


def cut(text: str) -> str:
    """Cut a text to `TEXT_MAX` characters, and escape the characters that UTF-8 cannot express."""
    text = text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"
    return text.encode(errors="backslashreplace").decode()
