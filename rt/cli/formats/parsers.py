"""From bytes to messages: the formats that `rt pub` reads, from files, stdin and directories.

Invariants:
- A malformed record is an error that names file and line. Records before it were published, records after it
  are not read.
- Before a read would block, the caller may publish the messages that it holds. A signal ends the command only
  there. So messages from a slow pipe are published as they arrive, and no data that was read is lost.

    lines  each line is a value, without its newline; a carriage return is kept
    json   each line is a JSON value, published unchanged; or an envelope (`rt.cli.formats.envelope`)
    csv    each record is a value: a JSON object of strings, by the header's names; blank lines are skipped
    files  each file is a value; its relative path is the topic
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import itertools
import json
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from msgspec import Struct

from rt.cli.formats.envelope import opened
from rt.cli.formats.publish_loop import PublishLoop
from rt.cli.signals import Interrupts
from rt.errors import FormatError, MessageTooLarge, TopicTooLong
from rt.log.format.constants import MESSAGE_BYTES_MAX, TOPIC_BYTES_MAX
from rt.units import parse_time


class Fields(Struct, frozen=True):
    """The fields that hold the topic and the timestamp of a record; `topic` is the default topic."""

    topic: str = ""
    topic_field: str | None = None
    timestamp_field: str | None = None


def feed_lines(path: str, reading: Parser, feed: PublishLoop, fields: Fields) -> None:
    for lines in reading.lines(path):
        feed.add_many(lines, fields.topic)


def feed_json(path: str, reading: Parser, feed: PublishLoop, fields: Fields) -> None:
    for where, line, found in _json_lines(path, reading):
        feed.add(line, _topic(found, fields, where), _timestamp(found, fields, where))


def feed_envelopes(path: str, reading: Parser, feed: PublishLoop, fields: Fields) -> None:
    for where, _, found in _json_lines(path, reading):
        try:
            content = opened(found)
        except ValueError as error:
            raise _bad(str(error), where) from error
        topic = content.topic if "topic" in found else fields.topic
        feed.add(content.value, _checked_topic(topic, where), content.timestamp_ns, content.headers)


def feed_csv(
    path: str, reading: Parser, feed: PublishLoop, fields: Fields, *, has_header: bool = True
) -> None:
    """Each record is an object of strings. Without a header the fields are called "1", "2", …"""
    csv.field_size_limit(MESSAGE_BYTES_MAX)
    records = csv.reader(_text_lines(path, reading), strict=True)
    names: list[str] | None = None
    for where, record in _records(path, records):
        if names is None:
            names = record if has_header else [str(index) for index in range(1, len(record) + 1)]
            _check_names(names, fields, where)
            if has_header:
                continue
        if len(record) != len(names):
            raise _bad("wrong number of columns", where, got=len(record), expected=len(names))
        found = dict(zip(names, record, strict=True))
        value = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
        feed.add(value, _topic(found, fields, where), _timestamp(found, fields, where))


def feed_files(path: str, reading: Parser, feed: PublishLoop) -> None:
    for file, topic in files_below(path):
        size = os.path.getsize(file)
        if size > MESSAGE_BYTES_MAX:
            raise MessageTooLarge(
                "the file is too large for a message",
                where=file,
                got=f"{size} bytes",
                expected=f"at most {MESSAGE_BYTES_MAX}",
                hint="Split it.",
            )
        feed.add(b"".join(reading.pieces(file)), _checked_topic(topic, file))


def _json_lines(path: str, reading: Parser) -> Iterator[tuple[str, bytes, Any]]:
    """Each line: file and line number, the bytes, and the parsed value."""
    for number, line in _numbered(path, reading):
        where = f"{shown(path)}, line {number}"
        try:
            found = parse_json(line)
        except ValueError as error:
            raise _bad(f"invalid JSON: {error}", where) from error
        yield where, line, found


def _numbered(path: str, reading: Parser) -> Iterator[tuple[int, bytes]]:
    return enumerate(itertools.chain.from_iterable(reading.lines(path)), start=1)


def parse_json(text: bytes) -> Any:
    """Parse JSON strictly by RFC 8259; `ValueError` for anything else."""
    try:
        return _decoder.decode(text.decode())
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _whole(digits: str) -> int | str:
    """An integer. A number with thousands of digits stays text, because Python refuses to convert it."""
    return int(digits) if len(digits) < 4000 else digits


_decoder = json.JSONDecoder(parse_constant=_refuse, parse_int=_whole)


def _text_lines(path: str, reading: Parser) -> Iterator[str]:
    encoding = "utf-8-sig"
    for number, line in _numbered(path, reading):
        try:
            yield line.decode(encoding) + "\n"
        except UnicodeDecodeError as error:
            raise _bad(f"invalid UTF-8: {error}", f"{shown(path)}, line {number}") from error
        encoding = "utf-8"


def _records(path: str, records: Any) -> Iterator[tuple[str, list[str]]]:
    name = shown(path)
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            raise _bad(f"invalid CSV: {error}", f"{name}, line {records.line_num}") from error
        if record:
            yield f"{name}, line {records.line_num}", record


def _check_names(names: list[str], fields: Fields, where: str) -> None:
    if len(set(names)) < len(names):
        raise _bad("two columns have the same name", where, got=", ".join(names))
    for expected in (fields.topic_field, fields.timestamp_field):
        if expected is not None and expected not in names:
            raise _bad("the column is missing", where, got=", ".join(names), expected=expected)


def _topic(found: Any, fields: Fields, where: str) -> str:
    if fields.topic_field is None:
        return fields.topic
    topic = found.get(fields.topic_field) if isinstance(found, dict) else None
    if not isinstance(topic, str):
        raise _bad("the topic is missing", where, expected=f"a string in the field {fields.topic_field!r}")
    return _checked_topic(topic, where)


def _checked_topic(topic: str, where: str) -> str:
    try:
        size = len(topic.encode())
    except UnicodeEncodeError as error:
        raise _bad(f"the topic is not valid UTF-8: {error}", where) from error
    if size > TOPIC_BYTES_MAX:
        raise TopicTooLong(
            "the topic is too long",
            where=where,
            got=f"{size} bytes of UTF-8",
            expected=f"at most {TOPIC_BYTES_MAX}",
        )
    return topic


def _timestamp(found: Any, fields: Fields, where: str) -> int | None:
    if fields.timestamp_field is None:
        return None
    stamp = found.get(fields.timestamp_field) if isinstance(found, dict) else None
    if type(stamp) is not int and not isinstance(stamp, str):
        raise _bad(
            "the timestamp is missing",
            where,
            expected=f"ns or RFC 3339 in the field {fields.timestamp_field!r}",
        )
    try:
        return parse_time(str(stamp))
    except ValueError as error:
        raise _bad(str(error), where) from error


def _bad(what: str, where: str, **parts: object) -> FormatError:
    hint = "This record and those after it were not published."
    return FormatError(what, where=where, hint=hint, **parts)


READ_BYTES = 2**20
STDIN = "-"


def total_bytes(paths: Sequence[str]) -> int | None:
    """The size of the input; None if it is not known (pipes, terminals)."""
    sizes = []
    for path in paths:
        found = _stat_stdin() if path == STDIN else os.stat(path)
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        sizes.append(found.st_size)
    return sum(sizes)


def _stat_stdin() -> os.stat_result | None:
    try:
        return os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return None


class Parser(Struct, frozen=True):
    """Reads inputs: `on_wait` is called before a read that blocks, `on_read` with the size of each read."""

    interrupts: Interrupts
    on_wait: Callable[[], None]
    on_read: Callable[[int], None]

    def pieces(self, path: str) -> Iterator[bytes]:
        """The bytes of a file, or of stdin for `-`, as they arrive."""
        with contextlib.ExitStack() as opened:
            stream: IO[bytes] = sys.stdin.buffer
            if path != STDIN:
                with self.interrupts.waiting():
                    stream = opened.enter_context(open(path, "rb"))
            while piece := self._read(stream, shown(path)):
                self.on_read(len(piece))
                yield piece

    def _read(self, stream: IO[bytes], name: str) -> bytes:
        """The bytes that are available now. The buffer of the stream is not used, because it would wait for
        more.
        """
        try:
            descriptor = stream.fileno()
        except (io.UnsupportedOperation, AttributeError):
            return stream.read(READ_BYTES)
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        if not ready.poll(0):
            self.on_wait()
        with self.interrupts.waiting():
            ready.poll()
        try:
            return os.read(descriptor, READ_BYTES)
        except OSError as error:
            if error.errno != errno.EBADF:  # EBADF: stdin is closed, and `standard_streams` reports it.
                error.filename = name
            raise

    def lines(self, path: str) -> Iterator[list[bytes]]:
        """The lines of a file without their newlines, in lists.

        Only a line feed ends a line; the last line may end without one. `rt.MessageTooLarge` names the line.
        """
        name, number = shown(path), 1
        rest: list[bytes] = []
        rest_bytes = 0
        for piece in self.pieces(path):
            lines = piece.split(b"\n")
            if rest_bytes + len(lines[0]) > MESSAGE_BYTES_MAX:
                raise _too_long(f"{name}, line {number}")
            if len(lines) == 1:
                rest.append(piece)
                rest_bytes += len(piece)
                continue
            lines[0] = b"".join((*rest, lines[0]))
            rest = [lines.pop()]
            rest_bytes = len(rest[0])
            number += len(lines)
            yield lines
        if rest_bytes:
            yield [b"".join(rest)]


def shown(path: str) -> str:
    return "stdin" if path == STDIN else path


def _too_long(where: str) -> MessageTooLarge:
    return MessageTooLarge(
        "the line is too long for a message", where=where, expected=f"at most {MESSAGE_BYTES_MAX} bytes"
    )


def files_below(path: str, topic: str = "") -> Iterator[tuple[str, str]]:
    """The regular files of a directory and all below it, sorted, each with its relative path, which is its
    topic.

    A link to a file counts as a file; links to directories are not followed. If `path` is a file, it is the
    only result.
    """
    if not os.path.isdir(path):
        yield path, topic or os.path.basename(path)
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        name = f"{topic}/{entry.name}" if topic else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(entry.path, name)
        elif entry.is_file():
            yield entry.path, name
