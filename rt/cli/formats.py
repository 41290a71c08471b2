"""From bytes to messages: the formats that `rt pub` reads.

Law: a record that is not what its format demands is an error which names file and line; what came before it
has been handed on, what comes after it is not looked at.

    lines  each line is a value, without its newline; all else in it is kept, a carriage return too
    json   each line is a JSON value, published as it stands; or an envelope (`rt.cli.envelope`)
    csv    each record is a value: a JSON object of strings, by the header's names; blank lines are no records
    files  each file is a value, its relative path the topic
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rt.cli.envelope import opened
from rt.cli.feed import Feed
from rt.cli.inputs import Reading, files_below, shown
from rt.cli.text import parse_time
from rt.errors import FormatError, MessageTooLarge, TopicTooLong
from rt.log.layout import MESSAGE_BYTES_MAX, TOPIC_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Fields:
    """Where a record's topic and timestamp stand; `topic` is the one of records that do not say."""

    topic: str = ""
    topic_field: str | None = None
    timestamp_field: str | None = None


def feed_lines(path: str, reading: Reading, feed: Feed, fields: Fields) -> None:
    """Each line is a value."""
    for lines in reading.lines(path):
        feed.add_many(lines, fields.topic)


def feed_json(path: str, reading: Reading, feed: Feed, fields: Fields) -> None:
    """Each line is JSON."""
    for where, line, found in _json_lines(path, reading):
        feed.add(line, _topic(found, fields, where), _timestamp(found, fields, where))


def feed_envelopes(path: str, reading: Reading, feed: Feed, fields: Fields) -> None:
    """Each line is an envelope."""
    for where, _, found in _json_lines(path, reading):
        try:
            content = opened(found)
        except ValueError as error:
            raise _bad(str(error), where) from error
        topic = content.topic if "topic" in found else fields.topic
        feed.add(content.value, _checked_topic(topic, where), content.timestamp_ns)


def feed_csv(path: str, reading: Reading, feed: Feed, fields: Fields, *, has_header: bool = True) -> None:
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
            raise _bad("wrong number of columns", where, got=len(record), wanted=len(names))
        found = dict(zip(names, record, strict=True))
        value = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
        feed.add(value, _topic(found, fields, where), _timestamp(found, fields, where))


def feed_files(path: str, reading: Reading, feed: Feed) -> None:
    """Each file is a value."""
    for file, topic in files_below(path):
        size = os.path.getsize(file)
        if size > MESSAGE_BYTES_MAX:
            raise MessageTooLarge(
                "file too large for a message",
                where=file,
                got=f"{size} bytes",
                wanted=f"at most {MESSAGE_BYTES_MAX}",
                hint="Split it.",
            )
        feed.add(b"".join(reading.pieces(file)), _checked_topic(topic, file))


def _json_lines(path: str, reading: Reading) -> Iterator[tuple[str, bytes, Any]]:
    """Each line: where it stands, as it is, and parsed."""
    name, number = shown(path), 0
    for lines in reading.lines(path):
        for line in lines:
            number += 1
            try:
                found = parse_json(line)
            except ValueError as error:
                raise _bad(f"no JSON: {error}", f"{name}, line {number}") from error
            yield f"{name}, line {number}", line, found


def parse_json(text: bytes) -> Any:
    """A JSON value of RFC 8259, strictly; `ValueError` for anything else."""
    try:
        return _decoder.decode(text.decode())
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _whole(digits: str) -> int | str:
    """A whole number; one of thousands of digits, which Python will not convert, is as good as text here."""
    return int(digits) if len(digits) < 4000 else digits


_decoder = json.JSONDecoder(parse_constant=_refuse, parse_int=_whole)


def _text_lines(path: str, reading: Reading) -> Iterator[str]:
    name, number, encoding = shown(path), 0, "utf-8-sig"
    for lines in reading.lines(path):
        for line in lines:
            number += 1
            try:
                yield line.decode(encoding) + "\n"
            except UnicodeDecodeError as error:
                raise _bad(f"no UTF-8: {error}", f"{name}, line {number}") from error
            encoding = "utf-8"


def _records(path: str, records: Any) -> Iterator[tuple[str, list[str]]]:
    name = shown(path)
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            raise _bad(f"no CSV: {error}", f"{name}, line {records.line_num}") from error
        if record:
            yield f"{name}, line {records.line_num}", record


def _check_names(names: list[str], fields: Fields, where: str) -> None:
    if len(set(names)) < len(names):
        raise _bad("two columns of one name", where, got=", ".join(names))
    for wanted in (fields.topic_field, fields.timestamp_field):
        if wanted is not None and wanted not in names:
            raise _bad("no such column", where, got=", ".join(names), wanted=wanted)


def _topic(found: Any, fields: Fields, where: str) -> str:
    if fields.topic_field is None:
        return fields.topic
    topic = found.get(fields.topic_field) if isinstance(found, dict) else None
    if not isinstance(topic, str):
        raise _bad("no topic", where, wanted=f"a string in the field {fields.topic_field!r}")
    return _checked_topic(topic, where)


def _checked_topic(topic: str, where: str) -> str:
    try:
        size = len(topic.encode())
    except UnicodeEncodeError as error:
        raise _bad(f"topic that is no UTF-8: {error}", where) from error
    if size > TOPIC_BYTES_MAX:
        raise TopicTooLong(
            "topic too long", where=where, got=f"{size} bytes of UTF-8", wanted=f"at most {TOPIC_BYTES_MAX}"
        )
    return topic


def _timestamp(found: Any, fields: Fields, where: str) -> int | None:
    if fields.timestamp_field is None:
        return None
    stamp = found.get(fields.timestamp_field) if isinstance(found, dict) else None
    if type(stamp) is not int and not isinstance(stamp, str):
        raise _bad("no timestamp", where, wanted=f"ns or RFC 3339 in the field {fields.timestamp_field!r}")
    try:
        return parse_time(str(stamp))
    except ValueError as error:
        raise _bad(str(error), where) from error


def _bad(what: str, where: str, *, got: object = None, wanted: object = None) -> FormatError:
    return FormatError(what, where=where, got=got, wanted=wanted, hint="Nothing from there on was published.")
