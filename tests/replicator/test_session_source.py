"""State shared by the streams of a pushed session: when they poll, and which files they see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import MemoryDisk
from publishers import DIRECTORY, on_memory

import rt
from replicator.protocol.handshake import PushProgress, PushStart
from replicator.protocol.messages import LogOffset
from replicator.push.send_pacer import SMALL_ROUNDS_MIN
from replicator.push.session_source import SessionSource
from replicator.send.read_cache import ReadCache
from replicator.send.sender import Sender
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason

CLUSTER = bytes(range(16))


def publish(root: Path, **options: int) -> str:
    """A run of some messages; returns the directory."""
    with rt.Publisher(root, "s", publisher_id="p", **options) as publisher:
        publisher.publish_many([b"value"] * 10)
        return publisher.directory


def end_of(directory: str, run: int) -> LogOffset:
    return LogOffset(run, 0, os.stat(os.path.join(directory, f"log.{run}.0")).st_size)


def merge(log: SessionSource, end: LogOffset) -> None:
    log.report("n1", PushProgress(end, 10, merged=end, merged_run=end.run, merged_number=10))


def send_in_small_rounds(log: SessionSource, end: LogOffset) -> None:
    """Send small rounds. The log then does not listen to writes until the last round, up to `end`, is
    merged.
    """
    log.start(PushStart(CLUSTER, 1, 3, "n1"))
    for left in reversed(range(SMALL_ROUNDS_MIN + 2)):
        reached = end._replace(offset=end.offset - left)
        log.wake()
        log.record_sending(reached)
        if left:
            merge(log, reached)


def is_looked(tmp_path: Path, *, meanwhile: Callable[[], object]) -> bool:
    """Whether the streams poll after the merge of a round during which the log did not listen."""
    directory = publish(tmp_path)
    end = end_of(directory, 0)

    async def play() -> bool:
        heard: list[bool] = []
        log = SessionSource(directory, "s", listen=heard.append)
        send_in_small_rounds(log, end)
        assert heard[-1:] == [False]
        changed = log.changed()
        meanwhile()
        merge(log, end)
        log.close()
        return changed.is_set()

    return asyncio.run(play())


def test_write_to_unsent_segment_while_not_listening_is_polled_when_round_is_merged(
    tmp_path: Path,
) -> None:
    """A stream that has announced a run waits until the node has opened it."""
    assert is_looked(tmp_path, meanwhile=lambda: publish(tmp_path))


def test_merged_round_without_new_writes_starts_no_poll(tmp_path: Path) -> None:
    assert not is_looked(tmp_path, meanwhile=lambda: None)


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_stream_started_within_round_sees_earlier_seals_and_trims(*, is_trimmed: bool) -> None:
    disk, cache = MemoryDisk(), ReadCache()
    with on_memory(disk) as publisher:
        publisher.publish(b"first")
        publisher.flush()
        shared = Sender(DIRECTORY, None, disk=disk, shared=cache)
        shared.items()
        shared.items()
        place = shared.next_offset
        publisher._log.writer.roll()
        if is_trimmed:
            publisher._log.writer.trim(SegmentId(0, 1), TrimReason.MERGED)
        publisher.publish(b"second")
        publisher.flush()
        later = Sender(DIRECTORY, place, disk=disk, shared=cache)
        assert later.items() == Sender(DIRECTORY, place, disk=disk).items()
