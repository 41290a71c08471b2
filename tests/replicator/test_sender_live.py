"""A sender that follows a publisher process that is killed repeatedly, on real files."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from replicator.protocol.messages import Chunk, Run, SegmentSealed
from replicator.send.sender import Sender
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.read.watch import DirectoryWatch
from rt.log.scan.directory import list_segments, read_table

KILLS = 15
SEED = random.randrange(2**32)
"""Drawn for each run. The assertions print it, so that a failure can be repeated."""
DEADLINE_SECONDS = 120

PROGRAM = """
import random, sys
import rt

root, seed = sys.argv[1], int(sys.argv[2])
draw = random.Random(seed)
publisher = rt.Publisher(
    root, "s", publisher_id="feed", batch_bytes=8192, roll_bytes=64 * 1024,
    linger_ms=draw.choice([0, 1]), fsync=draw.choice(["batch", "interval", "never"]),
)
while True:
    for _ in range(draw.randrange(1, 40)):
        publisher.publish(bytes(draw.randrange(3000)), topic=draw.choice("abc"))
    publisher.publish_many([bytes(draw.randrange(3000)) for _ in range(draw.randrange(1, 40))])
    if draw.random() < 0.3:
        publisher.flush()
"""


@pytest.mark.slow
def test_sender_returns_files_of_publisher_killed_repeatedly(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    directory = tmp_path / "s" / "sessions" / "feed"
    directory.mkdir(parents=True)
    received: dict[SegmentId, bytearray] = defaultdict(bytearray)
    sealed: dict[SegmentId, SegmentSealed] = {}
    lives: list[int] = []
    sender: Sender | None = None
    watch: DirectoryWatch | None = None

    def take() -> int:
        size = 0
        assert sender is not None
        for item in sender.items():
            match item:
                case Chunk(place, data):
                    assert place.offset == len(received[place.segment]), SEED
                    assert place.run == lives[-1], SEED
                    received[place.segment] += data
                    size += len(data)
                case SegmentSealed(place):
                    sealed[place.segment] = item
                case Run(run):
                    lives.append(run)
        return size

    for life in range(KILLS):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path, str(draw.randrange(2**32))])
        wanted, deadline = draw.randrange(50_000, 800_000), time.monotonic() + DEADLINE_SECONDS
        while wanted > 0 or lives[-1:] != [life]:  # The sent data may be left over from the previous run.
            assert time.monotonic() < deadline, SEED
            if sender is None:
                if (directory / "log.0.0").exists():
                    sender, watch = Sender(directory, None), DirectoryWatch(str(directory))
                continue
            taken = take()
            wanted -= taken
            if not taken:
                assert watch is not None
                watch.wait(1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert sender is not None
    assert watch is not None
    watch.close()
    while take():
        pass
    sender.close()
    table = read_table(REAL, str(directory))
    assert table is not None
    newest = list_segments(REAL, str(directory))[-1]
    for segment in list_segments(REAL, str(directory)):
        content = (directory / segment.file_name).read_bytes()
        assert content.startswith(bytes(received[segment])), SEED
        assert segment == newest or len(content) == len(received[segment]), SEED
    assert lives == list(range(KILLS)), SEED
    assert {*sealed} == {entry.id for entry in table.segments}, SEED
    last_of_run = {segment.run: segment for segment in sorted(sealed)}
    for segment, item in sealed.items():
        assert item.is_last_of_run == (segment == last_of_run[segment.run] and segment.run != KILLS - 1), SEED
