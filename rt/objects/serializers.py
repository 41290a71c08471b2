"""How elements become bytes: serializers, and the registry that knows them by type and by name.

The name is stored with the object, so that a `get` of another type is refused before a byte is read, and
nothing is ever unpickled that the program did not register as pickled.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

from rt.objects import json_values
from rt.objects.errors import NotSerializable, StateDamaged, WrongType

T = TypeVar("T")


class Serializer(ABC, Generic[T]):
    """Values of one type to bytes and back.

    Law: `load(dump(value))` equals `value` and is of its type, for every value that `check` lets pass.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise ValueError("a serializer needs a name: it is stored with what it wrote")
        self.name: Final = name

    @abstractmethod
    def check(self, value: T) -> None:
        """Raise `NotSerializable` if `value` cannot be dumped. Called at every edit, so it must be cheap."""

    @abstractmethod
    def dump(self, value: T) -> bytes:
        """The bytes of `value`; `NotSerializable` if there are none."""

    @abstractmethod
    def load(self, data: bytes) -> T:
        """The value again, a new object; `StateDamaged` for bytes that `dump` did not make."""


class JsonSerializer(Serializer[T]):
    """One that goes through JSON: a value is `to_plain`, something that `json_values` takes, and back.

    `of` are the exact types that pass; empty: whatever `json_values` takes.
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
        """The type, and then what the value is made of."""
        if self._of and type(value) not in self._of:
            wanted = " or ".join(sorted(each.__name__ for each in self._of))
            raise NotSerializable("a value of another type", got=type(value).__qualname__, wanted=wanted)
        json_values.check(self._to_plain(value) if self._to_plain else value)

    def dump(self, value: T) -> bytes:
        """JSON text."""
        return json_values.encode(self._to_plain(value) if self._to_plain else value)

    def load(self, data: bytes) -> T:
        """From JSON text."""
        return self.of_plain(json_values.decode(data))

    def of_plain(self, value: Any) -> T:
        """The value of what was decoded already."""
        if self._from_plain is not None:
            try:
                return self._from_plain(value)
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                raise StateDamaged("not a stored value", where=self.name, got=repr(error)[:200]) from error
        if self._of and type(value) not in self._of:
            raise StateDamaged("a stored value of another type", got=type(value).__name__, wanted=self.name)
        return cast(T, value)


class BytesSerializer(Serializer[bytes]):
    """Bytes as they are."""

    def check(self, value: bytes) -> None:
        """Exactly `bytes`: other buffers may change under us."""
        if type(value) is not bytes:
            raise NotSerializable("a value of another type", got=type(value).__qualname__, wanted="bytes")

    def dump(self, value: bytes) -> bytes:
        """The same bytes."""
        return value

    def load(self, data: bytes) -> bytes:
        """The same bytes."""
        return data


class PickleSerializer(Serializer[T]):
    """Pickled objects: for stores that nobody else can write, as unpickling runs what the bytes say.

    Never chosen by itself. `check` looks at the type only; what does not pickle fails the save.
    """

    def __init__(self, name: str, of: type[T]) -> None:
        super().__init__(name)
        self._of = of

    def check(self, value: T) -> None:
        """That it is an instance."""
        if not isinstance(value, self._of):
            wanted = self._of.__qualname__
            raise NotSerializable("a value of another type", got=type(value).__qualname__, wanted=wanted)

    def dump(self, value: T) -> bytes:
        """Pickle it."""
        try:
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickling runs the classes' own code
            raise NotSerializable("a value that does not pickle", got=repr(error)[:200]) from error

    def load(self, data: bytes) -> T:
        """Unpickle it."""
        try:
            value = pickle.loads(data)  # noqa: S301 - registered as pickled by the program itself
        except Exception as error:  # unpickling runs the classes' own code
            raise StateDamaged(
                "bytes that do not unpickle", where=self.name, got=repr(error)[:200]
            ) from error
        if not isinstance(value, self._of):
            wanted = self._of.__qualname__
            raise StateDamaged("a stored value of another type", got=type(value).__qualname__, wanted=wanted)
        return value


ANY: Final[Serializer[Any]] = JsonSerializer("json")
"""The default: JSON of None, bool, int, float, str, bytes, and list, tuple, set, frozenset, dict of them."""

Of: TypeAlias = type[T] | Serializer[T]
"""What elements are: a type that is registered, or a serializer."""


class Serializers:
    """The serializers of a space, by type and by name. Knows JSON, bytes, str, int, float and bool."""

    def __init__(self) -> None:
        self._by_type: dict[type, Serializer[Any]] = {}
        self._by_name: dict[str, Serializer[Any]] = {}
        self.register(object, ANY)
        self.register(bytes, BytesSerializer("bytes"))
        self.register(str, JsonSerializer[str]("str", str))
        self.register(int, JsonSerializer[int]("int", int))
        self.register(float, JsonSerializer[float]("float", float, int))
        self.register(bool, JsonSerializer[bool]("bool", bool))

    def register(self, kind: type[T], serializer: Serializer[T]) -> None:
        """Let `of=kind`, and its name in a store, mean `serializer`; `ValueError` if either is taken."""
        if kind in self._by_type or serializer.name in self._by_name:
            raise ValueError(f"{kind.__qualname__} or {serializer.name!r} is registered already")
        self._by_type[kind] = serializer
        self._by_name[serializer.name] = serializer

    def of(self, of: Of[T]) -> Serializer[T]:
        """The serializer of a type, or the one given; `WrongType` for a type that is not registered."""
        if isinstance(of, Serializer):
            return of
        found = self._by_type.get(of)
        if found is None:
            hint = "Register a serializer for it, or leave it out: JSON."
            raise WrongType("no serializer for that type", got=getattr(of, "__qualname__", of), hint=hint)
        return found

    def named(self, name: str) -> Serializer[Any]:
        """The one that is stored as `name`; `WrongType` if nobody registered it."""
        if name not in self._by_name:
            hint = "Register it with the space's serializers before the object is had."
            raise WrongType("stored by a serializer that is not registered", got=name, hint=hint)
        return self._by_name[name]
