"""From the batches that a walk found to the messages of a range, in columns.

Law: the messages come in order, each once; what cannot be decoded is named in its place, and takes no other
message with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from rt.log.batch import BadBatch
from rt.log.columns import Bytes, MessageBatch, Placed, PlacedRun, decode, decode_runs, groups
from rt.log.interest import Interest


class Undecodable(NamedTuple):
    """Messages from `start` up to `end` are as they were published, but cannot be decoded."""

    start: int
    end: int
    offset: int
    reason: str


def decode_range(
    data: memoryview,
    items: Sequence[Placed | PlacedRun],
    names: dict[int, str],
    interest: Interest,
    start: int,
    end: int,
) -> Iterator[MessageBatch | Undecodable]:
    """The messages of `items`, which lie in `data`, from position `start` up to `end`.

    `names` are the sessions by id. Of sessions and timestamps only what can be told of whole batches is left
    out, and that was not handed here; of topics single messages.
    """
    buffer = np.frombuffer(data, np.uint8)
    for kind, same in groupby(items, type):
        stretch: list[Any] = list(same)
        decoded = _decode_runs if kind is PlacedRun else _decode_each
        found = decoded(buffer, stretch, names, interest, start, end)
        for each in found:
            if isinstance(each, Undecodable):
                yield each._replace(start=max(each.start, start), end=min(each.end, end))
            elif (part := _part(each, interest, start, end)) is not None:
                yield part


def _decode_runs(
    buffer: Bytes, runs: Sequence[PlacedRun], names: dict[int, str], interest: Interest, start: int, end: int
) -> Iterator[MessageBatch | Undecodable]:
    wanted = [part for run in runs if (part := run.between(start, end)) is not None]
    if not wanted:
        return
    try:
        batch = decode_runs(buffer, wanted, names, values=interest.values)
    except BadBatch:
        singly = [placed for run in wanted for placed in run.placed(buffer.data)]
        yield from _decode_each(buffer, singly, names, interest, start, end)
        return
    if batch is not None:
        yield batch


def _decode_each(
    buffer: Bytes, batches: Sequence[Placed], names: dict[int, str], interest: Interest, start: int, end: int
) -> Iterator[MessageBatch | Undecodable]:
    wanted = [
        placed
        for placed in batches
        if placed.first_position < end and placed.first_position + placed.header.message_count > start
    ]
    for group in groups(wanted):
        yield from _decode(buffer, group, names, interest.values)


def _decode(
    buffer: Bytes, group: Sequence[Placed], names: dict[int, str], values: bool
) -> Iterator[MessageBatch | Undecodable]:
    """Decode a group; batch by batch if there is a bad one among them."""
    try:
        batch = decode(buffer, group, names, values=values)
    except BadBatch as reason:
        if len(group) > 1:
            for placed in group:
                yield from _decode(buffer, [placed], names, values)
            return
        _, header, first, skip, _, offset = group[0]
        yield Undecodable(first + skip, first + header.message_count, offset, str(reason))
        return
    if batch is not None:
        yield batch


def _part(batch: MessageBatch, interest: Interest, start: int, end: int) -> MessageBatch | None:
    if batch.positions[0] < start or batch.end > end:
        batch = batch.slice(*np.searchsorted(batch.positions, [start, end]).tolist())
    if not len(batch):
        return None
    return batch if interest.topics is None else batch.with_topics(interest.topics)
