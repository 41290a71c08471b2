"""How elements become bytes: serializers, and their registry by type and by name.

The serializer's name is stored with the object. So a `get` with another type fails before any byte is read,
and bytes are unpickled only by a serializer that the program registered for pickling.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

from rt.errors import InvalidOption
from rt.objects.core import typed_json
from rt.objects.core.errors import NotSerializable, StateDamaged, WrongType

T = TypeVar("T")


class ValueSerializer(ABC, Generic[T]):
    """Converts values of one type to bytes and back.

    Invariant: for every value that `check` accepts, `load(dump(value))` equals it and has its type.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise InvalidOption("a serializer needs a name: it is stored with the object")
        self.name: Final = name

    @abstractmethod
    def check(self, value: T) -> None:
        """Raise `NotSerializable` if `value` cannot be dumped. Called at every edit: must be cheap."""

    @abstractmethod
    def dump(self, value: T) -> bytes:
        """The bytes of `value`. May raise `NotSerializable`."""

    @abstractmethod
    def load(self, data: bytes) -> T:
        """A new object equal to the dumped value. Must raise `StateDamaged` for other bytes."""


class JsonValueSerializer(ValueSerializer[T]):
    """Values as JSON text. `to_plain` turns a value into one that `typed_json` accepts, `from_plain` back.

    `of`: the exact types accepted. Empty: every value that `typed_json` accepts.
    """

    def __init__(
        self,
        name: str,
        *of: type,
        to_plain: Callable[[T], Any] | None = None,
        from_plain: Callable[[Any], T] | None = None,
    ) -> None:
        super().__init__(name)
        self._of = frozenset(of)
        self._to_plain = to_plain
        self._from_plain = from_plain

    def check(self, value: T) -> None:
        if self._of and type(value) not in self._of:
            expected = " or ".join(sorted(each.__name__ for each in self._of))
            raise NotSerializable("wrong type of a value", got=type(value).__qualname__, expected=expected)
        typed_json.check(self._to_plain(value) if self._to_plain else value)

    def dump(self, value: T) -> bytes:
        return typed_json.encode(self._to_plain(value) if self._to_plain else value)

    def load(self, data: bytes) -> T:
        return self.of_plain(typed_json.decode(data))

    @property
    def is_plain(self) -> bool:
        """Whether `of_plain` returns every value as it is."""
        return self._from_plain is None and not self._of

    def of_plain(self, value: Any) -> T:
        """Convert decoded JSON into a value."""
        if self._from_plain is not None:
            try:
                return self._from_plain(value)
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                raise StateDamaged(
                    "not a value of this serializer", where=self.name, got=repr(error)[:200]
                ) from error
        if self._of and type(value) not in self._of:
            raise StateDamaged("wrong type of a stored value", got=type(value).__name__, expected=self.name)
        return cast(T, value)


class BytesSerializer(ValueSerializer[bytes]):
    def check(self, value: bytes) -> None:
        """Only `bytes`: other buffers can change later."""
        if type(value) is not bytes:
            raise NotSerializable("wrong type of a value", got=type(value).__qualname__, expected="bytes")

    def dump(self, value: bytes) -> bytes:
        return value

    def load(self, data: bytes) -> bytes:
        return data


class PickleSerializer(ValueSerializer[T]):
    """Pickled objects. Use only for a store that no one else can write: unpickling runs code.

    Never chosen by default. `check` tests only the type; a value that cannot be pickled fails the save.
    """

    def __init__(self, name: str, of: type[T]) -> None:
        super().__init__(name)
        self._of = of

    def check(self, value: T) -> None:
        if not isinstance(value, self._of):
            expected = self._of.__qualname__
            raise NotSerializable("wrong type of a value", got=type(value).__qualname__, expected=expected)

    def dump(self, value: T) -> bytes:
        try:
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickling runs the class's own code
            raise NotSerializable("the value cannot be pickled", got=repr(error)[:200]) from error

    def load(self, data: bytes) -> T:
        try:
            value = pickle.loads(data)  # noqa: S301 - the program registered the type for pickling
        except Exception as error:  # unpickling runs the class's own code
            raise StateDamaged(
                "stored bytes cannot be unpickled", where=self.name, got=repr(error)[:200]
            ) from error
        if not isinstance(value, self._of):
            expected = self._of.__qualname__
            raise StateDamaged(
                "wrong type of a stored value", got=type(value).__qualname__, expected=expected
            )
        return value


ANY: Final[ValueSerializer[Any]] = JsonValueSerializer("json")
"""The default:

JSON of None, bool, int, float, str, bytes, and of list, tuple, set, frozenset, dict of these.
"""

Of: TypeAlias = type[T] | ValueSerializer[T]
"""The type of elements: a registered type, or a serializer."""


class Serializers:
    """The serializers of a space, by type and by name. Has JSON, bytes, str, int, float and bool."""

    def __init__(self) -> None:
        self._by_type: dict[type, ValueSerializer[Any]] = {}
        self._by_name: dict[str, ValueSerializer[Any]] = {}
        self.register(object, ANY)
        self.register(bytes, BytesSerializer("bytes"))
        self.register(str, JsonValueSerializer[str]("str", str))
        self.register(int, JsonValueSerializer[int]("int", int))
        self.register(float, JsonValueSerializer[float]("float", float, int))
        self.register(bool, JsonValueSerializer[bool]("bool", bool))

    def register(self, kind: type[T], serializer: ValueSerializer[T]) -> None:
        """Use `serializer` for `of=kind` and for its name in a store.

        Raises `ValueError` if either is registered.
        """
        if kind in self._by_type or serializer.name in self._by_name:
            raise InvalidOption(f"{kind.__qualname__} or {serializer.name!r} is registered already")
        self._by_type[kind] = serializer
        self._by_name[serializer.name] = serializer

    def of(self, of: Of[T]) -> ValueSerializer[T]:
        """The serializer of a type, or `of` if it is one. `WrongType` if the type is not registered."""
        if isinstance(of, ValueSerializer):
            return of
        found = self._by_type.get(of)
        if found is None:
            hint = "Register a serializer for the type, or leave out the type to store JSON."
            raise WrongType("no serializer for the type", got=getattr(of, "__qualname__", of), hint=hint)
        return found

    def named(self, name: str) -> ValueSerializer[Any]:
        """The serializer with this stored name; `WrongType` if none is registered."""
        if name not in self._by_name:
            hint = "Register it with the space's serializers before the object is read."
            raise WrongType("the serializer of a stored object is not registered", got=name, hint=hint)
        return self._by_name[name]
