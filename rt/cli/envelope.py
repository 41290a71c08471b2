"""Messages as JSON objects, one a line: what `--json` writes and `--envelope` takes back.

    {"position":7,"timestamp_ns":1700000000000000000,"session":"feed","number":7,"topic":"t","value":"text"}

A value that is no UTF-8 stands in `value_base64` instead of `value`. Topic, timestamp and value are taken
back exactly; position, session and number are those of the log they came from.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from rt.log.columns import Message

_quoted = lru_cache(maxsize=4096)(encode_basestring_ascii)


class Content(NamedTuple):
    """What of an envelope is published again."""

    topic: str
    timestamp_ns: int | None
    value: bytes


def envelopes(messages: Iterable[Message]) -> Iterator[bytes]:
    """Each message as a line."""
    for position, timestamp_ns, session, number, topic, value in messages:
        try:
            content = f'"value":{encode_basestring_ascii(value.decode())}'
        except UnicodeDecodeError:
            content = f'"value_base64":"{base64.b64encode(value).decode()}"'
        line = (
            f'{{"position":{position},"timestamp_ns":{timestamp_ns},"session":{_quoted(session)},'
            f'"number":{number},"topic":{_quoted(topic)},{content}}}\n'
        )
        yield line.encode()


def opened(envelope: Any) -> Content:
    """What is in an envelope that was parsed already; `ValueError` if it is none."""
    if not isinstance(envelope, dict) or ("value" in envelope) == ("value_base64" in envelope):
        raise ValueError("no envelope: an object with either value or value_base64")
    topic, stamp = envelope.get("topic", ""), envelope.get("timestamp_ns")
    if not isinstance(topic, str) or not (stamp is None or type(stamp) is int):
        raise ValueError("no envelope: topic must be a string, timestamp_ns a whole number")
    return Content(topic, stamp, _value(envelope))


def _value(envelope: dict[str, Any]) -> bytes:
    text, encoded = envelope.get("value"), envelope.get("value_base64")
    if isinstance(text, str):
        return text.encode()
    try:
        if isinstance(encoded, str):
            return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"no envelope: value_base64 is not base64: {error}") from error
    raise ValueError("no envelope: the value must be a string")
