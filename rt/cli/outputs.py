"""From messages to bytes: the formats that `rt sub` writes, each batch in one piece.

Law: what `rt pub` read in a format comes out as it went in. A message that its format cannot hold is an error
which names its position; what came before it has been written.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, Protocol

from rt.cli.envelope import envelopes
from rt.cli.formats import parse_json
from rt.errors import FormatError
from rt.log.columns import Message


class Rows(Protocol):
    """Some messages: a `rt.MessageBatch`, or `Polled`."""

    @property
    def values(self) -> list[bytes]:
        """The values."""

    def messages(self) -> Iterator[Message]:
        """The messages one by one."""

    def __len__(self) -> int: ...


class Polled:
    """Messages that came one by one."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    @property
    def values(self) -> list[bytes]:
        """The values."""
        return [message.value for message in self._messages]

    def messages(self) -> Iterator[Message]:
        """The messages one by one."""
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)


class Output(Protocol):
    """Where messages go."""

    def write(self, rows: Rows) -> None:
        """Write them all; on return they are out of this process's hands."""


class Encoder(Protocol):
    """A format."""

    def __call__(self, rows: Rows) -> Iterable[bytes]:
        """The pieces to write, in order; raises at the first message that it cannot hold."""


class StreamOutput:
    """A stream, in some format."""

    def __init__(self, stream: BinaryIO, encoder: Encoder) -> None:
        self._stream = stream
        self._encoder = encoder

    def write(self, rows: Rows) -> None:
        """Encode, write and flush."""
        pieces: list[bytes] = []
        try:
            pieces.extend(self._encoder(rows))
        finally:
            self._stream.write(b"".join(pieces))
            self._stream.flush()


def as_lines(rows: Rows) -> Iterator[bytes]:
    """Each value and a newline."""
    yield b"\n".join((*rows.values, b""))


def as_envelopes(rows: Rows) -> Iterator[bytes]:
    """Each message as an envelope."""
    return envelopes(rows.messages())


def as_json_lines(rows: Rows) -> Iterator[bytes]:
    """Each value, which must be JSON on one line, as it stands."""
    for message in rows.messages():
        try:
            parse_json(message.value)
        except ValueError as error:
            raise _bad(f"no JSON: {error}", message) from error
        if b"\n" in message.value:
            raise _bad("JSON on more than one line", message)
        yield message.value + b"\n"


class CsvEncoder:
    """Each value, which must be an object, as a record.

    The columns are `columns`, or the first object's keys, which all others must then have.
    """

    def __init__(self, columns: Sequence[str] | None = None, *, has_header: bool = True) -> None:
        self._columns = None if columns is None else list(columns)
        self._is_chosen = columns is not None
        self._wants_header = has_header

    def __call__(self, rows: Rows) -> Iterator[bytes]:
        """The header, once, and a record for each message."""
        for message in rows.messages():
            found = _object(message)
            if self._columns is None:
                self._columns = list(found)
            if self._wants_header:
                self._wants_header = False
                yield _record(self._columns)
            if not self._is_chosen and found.keys() != set(self._columns):
                raise _bad(
                    "other keys than the first message's",
                    message,
                    got=", ".join(found),
                    wanted=", ".join(self._columns),
                    hint="Choose some with --columns.",
                )
            yield _record([_cell(found.get(column)) for column in self._columns])


def _object(message: Message) -> dict[str, object]:
    try:
        found = parse_json(message.value)
    except ValueError as error:
        raise _bad(f"no JSON: {error}", message) from error
    if not isinstance(found, dict):
        raise _bad("no JSON object", message)
    return found


def _cell(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _record(cells: Sequence[str]) -> bytes:
    """A CSV record. A carriage return must be quoted, which the csv module does only with all the rest."""
    text = io.StringIO()
    has_return = any("\r" in cell for cell in cells)
    csv.writer(
        text, lineterminator="\n", quoting=csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL
    ).writerow(cells)
    return text.getvalue().encode()


def _bad(
    what: str, message: Message, *, got: object = None, wanted: object = None, hint: str | None = None
) -> FormatError:
    where = f"position {message.position}"
    return FormatError(what, where=where, got=got, wanted=wanted, hint=hint)
