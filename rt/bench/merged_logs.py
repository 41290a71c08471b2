"""Merged logs to read: random values, in batches as publishers write them, or one message per batch."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from rt.client.publisher import Publisher
from rt.log.format.batch import BatchDraft, encode_batch
from rt.log.format.checksum import batch_seed
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.directory import session_directory
from rt.log.write.writer import BatchFrames, LogWriter
from rt.testing.merged import MergedLogBuilder

BATCH_BYTES: Final = 256 * 1024
BLOCK_BYTES: Final = 4 * 2**20
TOPIC: Final = "trade"
_SESSIONS: Final = ("one", "two")
_DISTINCT: Final = 20_000
_TOGETHER: Final = 1000


def make_log(
    root: str,
    name: str,
    *,
    count: int,
    value_bytes: int,
    one_each: bool = False,
    topics: Sequence[str] = (TOPIC,),
) -> str:
    """Make a merged log of `count` messages in `root`; return its directory. With `one_each` a batch holds
    one message. Consecutive messages have consecutive `topics`.
    """
    assert len(topics) == 1 or not one_each
    values = [os.urandom(value_bytes) for _ in range(min(_DISTINCT, count))]
    write = _write_one_each if one_each else partial(_write, topics=topics)
    path = os.path.join(root, name)
    sessions = [write(path, session, values, count // len(_SESSIONS)) for session in _SESSIONS]
    merged = os.path.join(path, "merged")
    with MergedLogBuilder(merged, cluster_id=os.urandom(16), stream="bench") as log:
        log.merge_all(sessions, block_bytes=BLOCK_BYTES)
    return merged


def _write(
    root: str, session: str, values: Sequence[bytes], count: int, topics: Sequence[str] = (TOPIC,)
) -> str:
    with Publisher(root, "bench", publisher_id=session, batch_bytes=BATCH_BYTES, fsync="never") as publisher:
        endless = itertools.cycle(values)
        if len(topics) > 1:
            for value, topic in zip(itertools.islice(endless, count), itertools.cycle(topics), strict=False):
                publisher.publish(value, topic=topic)
            return publisher.directory
        for start in range(0, count, _DISTINCT):
            publisher.publish_many(
                list(itertools.islice(endless, min(_DISTINCT, count - start))), topic=TOPIC
            )
    return publisher.directory


def _write_one_each(root: str, session: str, values: Sequence[bytes], count: int) -> str:
    path = session_directory(root, "bench", session)
    writer = LogWriter.open(path, LogIdentity(LogKind.SESSION, os.urandom(16), session))
    writer.start(SegmentId(0, 0), first=0, run_id=os.urandom(8))
    assert writer.active is not None
    endless = itertools.cycle(values)
    for start in range(0, count, _TOGETHER):
        frames, offset = [], writer.offset
        for number in range(start, min(start + _TOGETHER, count)):
            value, now = next(endless), time.time_ns()
            draft = BatchDraft(
                value, np.array([0, len(value)], np.int32), np.array([now]), now, now, [TOPIC.encode()]
            )
            pieces = encode_batch(draft, first=number, seed=batch_seed(writer.active.seed, offset))
            offset += sum(map(len, pieces))
            frames.append(BatchFrames(pieces, number + 1, now, now))
        writer.append(frames)
    writer.close()
    return path
