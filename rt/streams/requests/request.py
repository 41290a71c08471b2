"""The requests that others may send to the owner of a queue, and its answers, as bytes. Pure.

The bytes that are read here were written by another host, so they are checked like any other input.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from msgspec import Struct
from msgspec.structs import asdict

from rt.errors import InvalidOption, Overloaded, RtError
from rt.names import check_name
from rt.streams.core.errors import (
    NoSuchSubscription,
    NotRewindable,
    OwnerTimeout,
    StreamError,
    StreamMisplaced,
)
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, checked_token

Action: TypeAlias = Literal["subscribe", "resume", "reset", "end", "pause", "continue"]
"""`pause` and `continue` are about the whole queue."""
TEXT_BYTES_MAX: Final = 4096
REASON_CHARACTERS_MAX: Final = 1000
_ERRORS: Final[dict[str, type[RtError]]] = {
    kind.__name__: kind
    for kind in (
        InvalidOption,
        NoSuchSubscription,
        NotRewindable,
        Overloaded,
        OwnerTimeout,
        StreamError,
        StreamMisplaced,
    )
}
Start: TypeAlias = SequenceToken | StartPosition | None


class QueueRequest(Struct, frozen=True):
    """`subscription` is an id. `topic`, `consumer` and `name` belong to a new subscription. If `start` is
    None, the subscription continues at its position.
    """

    action: Action
    subscription: str = ""
    topic: str = ""
    consumer: str | None = None
    name: str | None = None
    start: Start = None
    needs_consumer: bool = False
    """Whether to reject the request if the owner has no consumer for the subscription."""

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise InvalidOption(f"a request to do {self.action!r:.100}")
        for text in (self.subscription, self.topic, self.consumer or "", self.name or ""):
            if len(str(text).encode()) > TEXT_BYTES_MAX:
                raise InvalidOption(f"got {text!r:.100}, expected text of {TEXT_BYTES_MAX} bytes at most")
        if self.consumer is not None:
            check_name(self.consumer, kind="consumer")
        if self.name is not None:
            check_name(self.name, kind="subscription")
        if self.start is not None and not isinstance(self.start, StartPosition):
            checked_token(self.start)
        if self.action == "reset" and self.start is None:
            raise InvalidOption("a reset needs a position")

    def encode(self) -> bytes:
        start = self.start.value if isinstance(self.start, StartPosition) else self.start
        return json.dumps({**asdict(self), "start": start}).encode()


def decode_request(content: bytes) -> QueueRequest:
    """Decode a request. `rt.InvalidOption` if it is not a request that this version knows."""
    try:
        found = json.loads(content)
        texts = [found.get(each) for each in ("subscription", "topic", "consumer", "name")]
        if not all(each is None or isinstance(each, str) for each in texts):
            raise TypeError("a text is missing")
        return QueueRequest(**{**found, "start": _start_of(found.get("start"))})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidOption(f"not a request that this host knows: {error}"[:500]) from error


def _start_of(found: object) -> Start:
    if isinstance(found, str):
        return StartPosition(found)
    return None if found is None else SequenceToken(*_list(found))


def _list(found: object) -> list[Any]:
    if not isinstance(found, list):
        raise TypeError(f"{type(found).__name__} is no token")
    return found


class QueueAnswer(Struct, frozen=True):
    """The result of a request. `state` is the state after it: of the subscription "served", "unattended",
    "faulted" or "ended", of the queue "paused" or "continued". `error`: the error because of which nothing
    was done.
    """

    subscription: str = ""
    state: str = ""
    error: str = ""
    reason: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def check(self) -> QueueAnswer:
        """Raise the owner's error, if there is one."""
        if not self.error:
            return self
        kind = _ERRORS.get(self.error, StreamError)
        raise kind(f"the owner of the queue rejected the request: {self.reason}")


def rejection(error: Exception) -> QueueAnswer:
    kind = next((name for name, kind in _ERRORS.items() if type(error) is kind), StreamError.__name__)
    return QueueAnswer(error=kind, reason=str(error)[:REASON_CHARACTERS_MAX])


def decode_answer(content: bytes) -> QueueAnswer:
    """Decode an answer. `StreamError` if it is not valid."""
    try:
        found = {name: str(value) for name, value in json.loads(content).items()}
        return QueueAnswer(**found)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StreamError("the owner's answer is not valid", got=str(error)[:200]) from error


class PostedRequest(Protocol):
    """A request as the store of a queue keeps it, until its time is over."""

    @property
    def id(self) -> bytes: ...

    @property
    def content(self) -> bytes: ...

    @property
    def until_ns(self) -> int: ...


@runtime_checkable
class RequestedStore(Protocol):
    """A store that has requests for its owner. Its writers answer them: `RequestedWriter`."""

    def requests(self) -> Awaitable[Sequence[PostedRequest]]:
        """The requests that are not answered, as far as the store knows."""


@runtime_checkable
class RequestedWriter(Protocol):
    def answer(self, request: bytes, until_ns: int, content: bytes) -> None:
        """Answer a request in this commit, which removes it."""


@runtime_checkable
class RequestingStores(Protocol):
    """Stores through which any host can ask the owner of a queue."""

    async def ask_owner(self, queue: QueueId, content: bytes, timeout_s: float) -> bytes:
        """Return the owner's answer. `OwnerTimeout` if no answer arrives in time."""
