"""Dead letters as events of a stream: what they hold, and how they are read.

The dead letters of namespace `trades` are the stream `dead-letters/trades`. An event of it is a JSON object:

    subscription   the id, the name or the pattern of the subscription
    namespace, key its stream
    position       the sequence number of the event, and `index` within its message
    reason         why it was not accepted
    value          the event in base64; `text` instead if it was no bytes
    cut            how many bytes or characters are missing at the end of the event, if it was too large
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from rt.errors import InvalidOption, MessageTooLarge
from rt.log.format.constants import TOPIC_BYTES_MAX
from rt.serializers import Serializer
from rt.streams.core.errors import NotWritable
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.observer import DeadLetter

logger = logging.getLogger("rt.streams")

NAMESPACE: Final = "dead-letters"
KEPT_BYTES: Final = 1 << 16
"""How many bytes or characters of an event are kept, if the event is too large for a dead letter."""


def stream_of_letters(stream: StreamId) -> StreamId:
    """The stream for the dead letters of `stream`. Its key is `-` if the namespace of `stream` is empty or
    too long for a key.
    """
    made = StreamId(NAMESPACE, stream.namespace or "-")
    return made if len(made.topic.encode()) <= TOPIC_BYTES_MAX else StreamId(NAMESPACE, "-")


def checked_serializers(serializers: Mapping[str, Serializer[Any]]) -> dict[str, Serializer[Any]]:
    """Return a copy of `serializers`. `rt.InvalidOption` if one of them is for dead letters."""
    if NAMESPACE in serializers:
        raise InvalidOption(
            "dead letters have a format of their own",
            where="serializers",
            got=NAMESPACE,
            hint=f"Remove the serializer of the namespace `{NAMESPACE}`.",
        )
    return dict(serializers)


class StoredLetter(Struct, frozen=True):
    """A dead letter as it was read. `event` is text if the event was no bytes.

    `cut`: how many bytes or characters are missing at its end. The whole event is at `token` in its stream,
    until the log is trimmed.
    """

    subscription: str
    stream: StreamId
    token: SequenceToken
    event: bytes | str
    reason: str
    cut: int = 0


async def publish_letter(
    publish: Callable[[StreamId, Sequence[Any]], Awaitable[None]], letter: DeadLetter
) -> None:
    """Append the dead letter to its stream, cut if it is too large. Raises errors of `publish`."""
    if letter.stream.namespace == NAMESPACE:
        raise NotWritable("a dead letter that is rejected is retried", where=letter.stream)
    stream = stream_of_letters(letter.stream)
    try:
        await publish(stream, [encode_letter(letter)])
    except MessageTooLarge as error:
        where = letter.stream, letter.token
        logger.warning("dead_letter_cut stream=%s token=%s kept=%d error=%r", *where, KEPT_BYTES, error)
        await publish(stream, [encode_letter(letter, kept=KEPT_BYTES)])


def encode_letter(letter: DeadLetter, *, kept: int | None = None) -> bytes:
    """Encode a dead letter. `kept`: how many bytes or characters of the event to keep at most. None: all."""
    stream, token = letter.stream, letter.token
    is_bytes = isinstance(letter.event, bytes | bytearray | memoryview)
    event = bytes(letter.event) if is_bytes else repr(letter.event)
    part = event if kept is None else event[:kept]
    value: dict[str, str | int]
    value = {"value": base64.b64encode(part).decode()} if isinstance(part, bytes) else {"text": part}
    if len(part) < len(event):
        value["cut"] = len(event) - len(part)
    return json.dumps(
        {
            "subscription": letter.subscription,
            "namespace": stream.namespace,
            "key": stream.key,
            "position": token.sequence_number,
            "index": token.event_index,
            "reason": str(letter.error),
            **value,
        }
    ).encode()


def decode_letter(event: bytes) -> StoredLetter:
    """`ValueError` if it is no dead letter."""
    try:
        found = json.loads(event)
        return StoredLetter(
            str(found["subscription"]),
            StreamId(found["namespace"], found["key"]),
            SequenceToken(int(found["position"]), int(found["index"])),
            base64.b64decode(found["value"]) if "value" in found else str(found["text"]),
            str(found["reason"]),
            int(found.get("cut", 0)),
        )
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a dead letter: {event[:100]!r}") from error
