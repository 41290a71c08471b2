"""Arguments of a subscriber's pull client, and where it stores the copy."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct

from rt.endpoints import check_endpoints
from rt.errors import InvalidOption
from rt.log.read.start_position import CheckedPlace, StartTime, check_place
from rt.log.read.topic_patterns import check_wanted
from rt.log.scan.directory import merged_directory

if TYPE_CHECKING:
    from rt.net.tls import TLS

Retention: TypeAlias = Literal["follow", "own"]


class PullSettings(Struct, frozen=True):
    """What to pull, and how. An existing copy is continued at its end."""

    stream: str
    endpoints: tuple[str, ...]
    tls: TLS
    position: CheckedPlace = "earliest"
    topics: tuple[str, ...] = ()
    retention: Retention = "follow"
    name: str | None = None

    def __post_init__(self) -> None:
        check_endpoints(self.endpoints, is_required=True)
        check_place(self.position)
        check_retention(self.retention)
        check_wanted(self.topics)
        for text in self.topics:
            if "\0" in text:
                raise InvalidOption(f"{text!r} contains a NUL")

    def command(self, directory: str) -> Sequence[str]:
        """The command line of the pull client."""
        tls, start = self.tls, self.position
        position = f"--since={start.timestamp_ns}" if isinstance(start, StartTime) else f"--position={start}"
        named = [] if self.name is None else [f"--name={self.name}"]
        return [
            *(sys.executable, "-m", "rt", "pull", directory, "--attached"),
            *(f"--stream={self.stream}", f"--endpoints={','.join(self.endpoints)}"),
            *(f"--ca={os.path.abspath(tls.ca)}", f"--cert={os.path.abspath(tls.cert)}"),
            *(f"--key={os.path.abspath(tls.key)}", f"--retention={self.retention}"),
            *(position, *named, *(f"--topic={topic}" for topic in self.topics)),
        ]


def check_retention(retention: Retention) -> Retention:
    if retention not in ("follow", "own"):
        raise InvalidOption(f"retention={retention!r}: use 'follow' or 'own'")
    return retention


def copy_directory(root: str, stream: str, topics: Collection[str]) -> str:
    """Where a subscriber stores its copy of `stream` below `root`: all of it, or filtered by `topics`."""
    if not topics:
        return merged_directory(root, stream)
    digest = hashlib.sha256(json.dumps(sorted(topics)).encode()).hexdigest()
    return os.path.join(root, stream, "filtered", digest[:32])
