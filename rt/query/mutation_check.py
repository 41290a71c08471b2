"""Finds values that were changed after an operator emitted them. For tests and debugging: it is slow.

Values are not copied: all queries, operators and consumers that receive a value share it. So no code may
change a value that it received or emitted. The check remembers the last emitted values and their contents. It
compares them before and after each call of a receiver. If a value has changed, the code that ran between two
comparisons changed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, Final, NamedTuple

from msgspec import Struct

from rt.query.core.errors import ValueChanged
from rt.query.core.observable import Observable, Observer, Watched
from rt.query.core.operator import Operator, operator_of

REMEMBERED: Final = 64
"""Number of remembered values. Every change of a remembered value is found."""

_TEXT_MAX: Final = 200
_PLAIN: Final = frozenset({type(None), bool, int, str, bytes, complex})


class _Emitted(NamedTuple):
    value: Any
    content: Any
    text: str
    operator: str


class MutationCheck:
    """Pass `watch` to a `QueryRuntime`. `found`: the changes so far, each of which ended its query."""

    def __init__(self) -> None:
        self.found: list[ValueChanged] = []
        self._emitted: dict[int, _Emitted] = {}

    def watch(self, operator: Operator[Any, Any], out: Observer[Any]) -> Observer[Any]:
        """Return an observer that replaces `out`, the observer to which the operator sends."""
        return _Watched(self, operator, out)

    def remember(self, value: Any, operator: str) -> None:
        """A value is emitted. Does nothing if it cannot change."""
        if id(value) in self._emitted or not _can_change(value):
            return
        if len(self._emitted) == REMEMBERED:
            del self._emitted[next(iter(self._emitted))]
        self._emitted[id(value)] = _Emitted(value, _content(value, ()), _text(value), operator)

    def check(self, running: str) -> None:
        """Raise `ValueChanged` if `running` changed a value."""
        for key, each in list(self._emitted.items()):
            if _content(each.value, ()) != each.content:
                del self._emitted[key]
                error = ValueChanged(running, each.operator, each.text, _text(each.value))
                self.found.append(error)
                raise error


def keeping_arguments(function: Callable[..., Any], operator: Operator[Any, Any]) -> Callable[..., Any]:
    """Wrap `function` of `operator`. The wrapper raises `ValueChanged` if the function changes its
    arguments.
    """

    def call(*arguments: Any) -> Any:
        before = [(_content(each, ()), _text(each)) for each in arguments]
        result = function(*arguments)
        for each, (content, text) in zip(arguments, before, strict=True):
            if _content(each, ()) != content:
                name = _name(operator)
                raise ValueChanged(f"{_named(function)} of {name}", name, text, _text(each))
        return result

    return call


class _Watched(Watched):
    def __init__(self, check: MutationCheck, operator: Operator[Any, Any], out: Observer[Any]) -> None:
        super().__init__(out)
        self._check = check
        self._emitter = _name(operator)
        receiver = operator_of(out)
        self._receiver = f"output after {self._emitter}" if receiver is None else _name(receiver)

    def on_next(self, value: Any, /) -> None:
        self._check.check(self._emitter)
        self._check.remember(value, self._emitter)
        self.out.on_next(value)
        self._check.check(self._receiver)

    def on_error(self, error: Exception, /) -> None:
        self._check.check(self._emitter)
        self.out.on_error(error)

    def on_completed(self) -> None:
        self._check.check(self._emitter)
        self.out.on_completed()


def _name(operator: Operator[Any, Any]) -> str:
    query_id, _, place = operator.address.partition("#")
    return f"operator {place} ({operator.NAME}) of query {query_id!r}"


def _named(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))


def _text(value: Any) -> str:
    return repr(value)[:_TEXT_MAX]


def _can_change(value: Any) -> bool:
    """Whether the value, or something in it, can change. Unknown objects can if they have attributes."""
    kind = type(value)
    if kind in _PLAIN or kind is float or isinstance(value, Observable):
        return False
    if isinstance(value, (tuple, frozenset)):
        return any(map(_can_change, value))
    if _is_frozen(kind):
        return any(_can_change(each) for _, each in _attributes(value))
    return isinstance(value, (list, deque, dict, set, bytearray)) or any(True for _ in _attributes(value))


def _is_frozen(kind: type) -> bool:
    if issubclass(kind, Struct):
        return kind.__struct_config__.frozen
    return is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _content(value: Any, around: tuple[int, ...]) -> Any:
    """A snapshot that stays equal while the value does not change. `around`: the ids of its containers."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, repr(value)  # NaN is not equal to itself.
    if id(value) in around or isinstance(value, Observable):
        return kind, id(value)
    inside = (*around, id(value))
    if isinstance(value, (list, tuple, deque)):
        return kind, [_content(each, inside) for each in value]
    if isinstance(value, dict):
        return kind, [(_content(key, inside), _content(each, inside)) for key, each in value.items()]
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(value)
    if isinstance(value, bytearray):
        return kind, bytes(value)
    return kind, id(value), [(name, _content(each, inside)) for name, each in _attributes(value)]


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object of a class of the program."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in {"__dict__", "__weakref__"} and hasattr(value, name):
                yield name, getattr(value, name)
