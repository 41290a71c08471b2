"""Messages as JSON objects, one a line: `--json` writes them and `--envelope` reads them.

    {"position":7,"timestamp_ns":1700000000000000000,"session":"feed","run":0,"number":7,"topic":"t","value":"text"}

A value that is not UTF-8 is in `value_base64` instead of `value`. Headers, if there are any, follow it as
`"headers":[{"key":"k","value":"v"}]`. Topic, timestamp and value are read back
exactly. Position, session, run and number are those of the log that was read.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from rt.log.format.headers import Headers, checked_headers
from rt.log.scan.message_batch import Message

_quoted = lru_cache(maxsize=4096)(encode_basestring_ascii)


class MessageFields(NamedTuple):
    """The parts of an envelope that are published again."""

    topic: str
    timestamp_ns: int | None
    value: bytes
    headers: Headers = ()


def envelopes(messages: Iterable[Message]) -> Iterator[bytes]:
    for position, timestamp_ns, session, run, number, topic, value, headers in messages:
        try:
            content = f'"value":{encode_basestring_ascii(value.decode())}'
        except UnicodeDecodeError:
            content = f'"value_base64":"{base64.b64encode(value).decode()}"'
        if headers:
            content += f',"headers":[{",".join(map(_header, headers))}]'
        line = (
            f'{{"position":{position},"timestamp_ns":{timestamp_ns},"session":{_quoted(session)},'
            f'"run":{run},"number":{number},"topic":{_quoted(topic)},{content}}}\n'
        )
        yield line.encode()


def _header(pair: tuple[str, bytes]) -> str:
    key, value = pair
    try:
        return f'{{"key":{_quoted(key)},"value":{encode_basestring_ascii(value.decode())}}}'
    except UnicodeDecodeError:
        return f'{{"key":{_quoted(key)},"value_base64":"{base64.b64encode(value).decode()}"}}'


def opened(envelope: Any) -> MessageFields:
    """Read an envelope from parsed JSON; `ValueError` if it is malformed."""
    if not isinstance(envelope, dict) or ("value" in envelope) == ("value_base64" in envelope):
        raise ValueError("not an envelope: expected an object with either value or value_base64")
    topic, stamp = envelope.get("topic", ""), envelope.get("timestamp_ns")
    if not isinstance(topic, str) or not (stamp is None or type(stamp) is int):
        raise ValueError("not an envelope: topic must be a string and timestamp_ns an integer")
    return MessageFields(topic, stamp, _value(envelope), _headers_in(envelope.get("headers", [])))


def _headers_in(found: Any) -> Headers:
    if not isinstance(found, list) or not all(
        isinstance(each, dict) and isinstance(each.get("key"), str) for each in found
    ):
        raise ValueError("not an envelope: headers must be objects with key and value")
    return checked_headers([(each["key"], _value(each)) for each in found])


def _value(envelope: dict[str, Any]) -> bytes:
    text, encoded = envelope.get("value"), envelope.get("value_base64")
    if isinstance(text, str):
        return text.encode()
    try:
        if isinstance(encoded, str):
            return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not an envelope: value_base64 is not base64: {error}") from error
    raise ValueError("not an envelope: the value must be a string")
