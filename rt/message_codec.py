"""Encode values as protobuf messages, and decode them. The annotations of a value's fields determine how each
is encoded.

Pure. A field of a dataclass or NamedTuple is the message's field of the same name, unless its codec says
otherwise. By annotation:
- `X | None`: an absent field. If the message cannot distinguish absent from empty, None is empty.
- `tuple[X, ...]`: a repeated field.
- A dataclass or NamedTuple: a message with its fields.
- An enum: its number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from operator import attrgetter
from types import NoneType
from typing import Any, Final, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from msgspec import Struct

_Value = TypeVar("_Value")
_SCALARS: Final = (bool, bytes, int, str)


class FieldCodec(NamedTuple):
    """How one field of a value is encoded."""

    encode: Callable[[Any], dict[str, Any]]
    """From the value of the field to fields of the message."""
    decode: Callable[[Any], Any]
    """From the message to the value of the field."""


class MessageCodec(Generic[_Value]):
    """Encodes the values of one type as messages of one type.

    `special` maps the name of a value's field to the name of the message's field, to the codec of its values,
    or to a `FieldCodec`.
    """

    def __init__(
        self, kind: type[_Value], message: type[Message], **special: str | MessageCodec[Any] | FieldCodec
    ) -> None:
        self.kind = kind
        scalars, self._others = dict[str, str](), list[tuple[str, FieldCodec]]()
        hints = get_type_hints(kind)
        for name in _names(kind):
            how = special.pop(name, name)
            if isinstance(how, FieldCodec):
                self._others.append((name, how))
                continue
            place = message.DESCRIPTOR.fields_by_name[how if isinstance(how, str) else name]
            if hints[name] in _SCALARS:
                scalars[name] = place.name
            else:
                codec = how if isinstance(how, MessageCodec) else None
                self._others.append((name, _field(hints[name], place, codec)))
        assert not special, f"{kind.__name__} has no fields {[*special]}"
        # Most fields are scalars, which are copied together.
        self._names, self._places = tuple(scalars), tuple(scalars.values())
        self._get_names, self._get_places = _getter(self._names), _getter(self._places)
        self._is_in_order = self._names == _names(kind)

    def encode(self, value: _Value) -> dict[str, Any]:
        """The arguments that make the message."""
        encoded = dict(zip(self._places, self._get_names(value), strict=True))
        for name, field in self._others:
            encoded.update(field.encode(getattr(value, name)))
        return encoded

    def decode(self, message: Any) -> _Value:
        """The value, which checks itself when it is made."""
        if self._is_in_order:
            return self.kind(*self._get_places(message))
        values = dict(zip(self._names, self._get_places(message), strict=True))
        for name, field in self._others:
            values[name] = field.decode(message)
        return self.kind(**values)


class UnionCodec(Generic[_Value]):
    """Encodes values of several types. `kinds` maps each field of `oneof` to the type, or the codec, of its
    values.
    """

    def __init__(self, message: type[Message], oneof: str, **kinds: type | MessageCodec[Any]) -> None:
        self._oneof = oneof
        fields = message.DESCRIPTOR.oneofs_by_name[oneof].fields
        self._codecs = {field.name: _codec_of(kinds.pop(field.name), field) for field in fields}
        assert not kinds, f"{oneof} of {message.DESCRIPTOR.name} has no fields {[*kinds]}"
        self._name_of = {codec.kind: name for name, codec in self._codecs.items()}

    def encode(self, value: _Value) -> dict[str, Any]:
        """The argument that makes the message."""
        name = self._name_of[type(value)]
        return {name: self._codecs[name].encode(value)}

    def decode(self, message: Any) -> _Value:
        """The value. `ValueError` if the message has none. Raises what the value raises when it is made."""
        name = message.WhichOneof(self._oneof)
        if name is None:
            raise ValueError(f"it has no {self._oneof}")
        value: _Value = self._codecs[name].decode(getattr(message, name))
        return value


def inlined(codec: MessageCodec[Any], flag: str | None = None) -> FieldCodec:
    """A codec for a value whose fields are stored directly in the enclosing message. The value is None if the
    field `flag` of that message is false.
    """
    if flag is None:
        return FieldCodec(codec.encode, codec.decode)
    return FieldCodec(
        lambda value: {} if value is None else {flag: True} | codec.encode(value),
        lambda message: codec.decode(message) if getattr(message, flag) else None,
    )


def keyed(name: str, key: str, codec: MessageCodec[Any]) -> FieldCodec:
    """A codec for a dictionary as a repeated field, ordered by key. The field `key` of each of its messages
    holds the key.
    """
    return FieldCodec(
        lambda values: {name: [{key: one} | codec.encode(value) for one, value in sorted(values.items())]},
        lambda message: {getattr(one, key): codec.decode(one) for one in getattr(message, name)},
    )


def _names(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, Struct):
        return tuple(kind.__struct_fields__)
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return tuple(kind._fields)


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _codec_of(kind: type | MessageCodec[Any], field: Any) -> MessageCodec[Any]:
    if isinstance(kind, MessageCodec):
        return kind
    return MessageCodec(kind, GetMessageClass(field.message_type))


def _field(hint: Any, descriptor: Any, codec: MessageCodec[Any] | None) -> FieldCodec:
    name, get, args = descriptor.name, attrgetter(descriptor.name), get_args(hint)
    may_be_none, is_repeated = NoneType in args, get_origin(hint) is tuple
    kind = args[0] if args else hint
    encode: Callable[[Any], Any] = _unchanged
    decode: Callable[[Any], Any] = _unchanged
    if descriptor.message_type is not None:
        codec = _codec_of(codec or kind, descriptor)
        encode, decode = codec.encode, codec.decode
    elif issubclass(kind, Enum):
        decode = kind
    if is_repeated:
        return FieldCodec(
            lambda values: {name: [*map(encode, values)]}, lambda message: tuple(map(decode, get(message)))
        )
    if may_be_none and descriptor.has_presence:
        return FieldCodec(
            lambda value: {} if value is None else {name: encode(value)},
            lambda message: decode(get(message)) if message.HasField(name) else None,
        )
    if may_be_none:
        return FieldCodec(lambda value: {name: value}, lambda message: get(message) or None)
    return FieldCodec(lambda value: {name: encode(value)}, lambda message: decode(get(message)))


def _unchanged(value: Any) -> Any:
    return value
