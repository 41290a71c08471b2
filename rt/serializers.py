"""Serializers: a value of a program to the bytes of a message, and back.

    JsonSerializer, MsgpackSerializer   checked against a type, by msgspec
    AvroSerializer                      one schema, by fastavro (extra `avro`)
    ProtobufSerializer                  one class of messages

Invariants:
- Bytes that cannot be decoded raise `rt.UndecodableValue`, which names the message. No value is skipped.
- The libraries are imported when a serializer is made.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol, TypeVar, overload

from rt.errors import InvalidOption, UndecodableValue

if TYPE_CHECKING:
    from google.protobuf.message import Message as ProtobufMessage

    from rt.log.scan.message_batch import Message

T = TypeVar("T")
P = TypeVar("P", bound="ProtobufMessage")


class Serializer(Protocol[T]):
    """Converts values of one type. Implementations must allow calls from several threads."""

    @property
    def content_type(self) -> str:
        """The media type of the bytes, such as `application/json`."""

    def dumps(self, value: T, /) -> bytes:
        """The bytes of a value. May raise whatever fits for a value of another type."""

    def loads(self, data: bytes, /) -> T:
        """The value of the bytes. May raise whatever fits for other bytes."""


def decode(message: Message, serializer: Serializer[T]) -> T:
    """The value of a message. Raises `rt.UndecodableValue`, with the message's place."""
    try:
        return serializer.loads(message.value)
    except Exception as error:
        raise UndecodableValue(
            f"the value of a message is no {serializer.content_type} of the expected type",
            where=f"position {message.position}, session {message.session}, number {message.number}, "
            f"topic {message.topic!r}",
            got=f"{type(error).__name__}: {error}"[:500],
            hint="Read it without a serializer to see its bytes.",
        ) from error


class _MsgspecSerializer(Generic[T]):
    """Values of one type, in a format of msgspec."""

    _FORMAT: ClassVar[str]

    @overload
    def __init__(self: _MsgspecSerializer[Any]) -> None: ...

    @overload
    def __init__(self, of: type[T]) -> None: ...

    def __init__(self, of: Any = Any) -> None:
        module = importlib.import_module(f"msgspec.{self._FORMAT}")
        self._encode: Callable[[T], bytes] = module.encode
        self._decode: Callable[[bytes], T] = module.Decoder(of).decode
        self._has_type: Final = of is not Any

    def dumps(self, value: T, /) -> bytes:
        """`msgspec.ValidationError` for a value of another type: no reader could decode it."""
        data = self._encode(value)
        if self._has_type:
            self._decode(data)
        return data

    def loads(self, data: bytes, /) -> T:
        """`msgspec.ValidationError` for a value of another type."""
        return self._decode(data)


class JsonSerializer(_MsgspecSerializer[T]):
    """JSON of one type: a dataclass, TypedDict, `msgspec.Struct`, list or scalar. Default: any JSON."""

    content_type: Final = "application/json"
    _FORMAT = "json"


class MsgpackSerializer(_MsgspecSerializer[T]):
    """MessagePack of one type, as `JsonSerializer`."""

    content_type: Final = "application/vnd.msgpack"
    _FORMAT = "msgpack"


class AvroSerializer:
    """Records of one Avro schema, without a header: readers need the schema that the writer used.

    `schema` is the parsed JSON of the schema. `rt.InvalidOption` if it is malformed, or fastavro is missing.
    """

    content_type: Final = "application/vnd.apache.avro+binary"

    def __init__(self, schema: Mapping[str, Any]) -> None:
        try:
            import fastavro
        except ImportError as error:
            raise InvalidOption(
                "Avro needs fastavro", hint="Install it: pip install 'rt-transport[avro]'."
            ) from error
        try:
            self._schema = fastavro.parse_schema(dict(schema))
        except Exception as error:
            raise InvalidOption("not an Avro schema", where="schema", got=repr(error)[:200]) from error
        self._write, self._read = fastavro.schemaless_writer, fastavro.schemaless_reader

    def dumps(self, value: Any, /) -> bytes:
        buffer = io.BytesIO()
        self._write(buffer, self._schema, value)
        return buffer.getvalue()

    def loads(self, data: bytes, /) -> Any:
        """`ValueError` if bytes are left over; whatever fastavro raises for other bytes."""
        buffer = io.BytesIO(data)
        value = self._read(buffer, self._schema, None)
        if left := len(data) - buffer.tell():
            raise ValueError(f"{left} bytes after the record")
        return value


class ProtobufSerializer(Generic[P]):
    """Messages of one generated class."""

    content_type: Final = "application/x-protobuf"

    def __init__(self, of: type[P]) -> None:
        self._of = of

    def dumps(self, value: P, /) -> bytes:
        """`TypeError` for a message of another class."""
        if not isinstance(value, self._of):
            raise TypeError(f"got {type(value).__name__}, expected {self._of.__name__}")
        return value.SerializeToString()

    def loads(self, data: bytes, /) -> P:
        return self._of.FromString(data)
