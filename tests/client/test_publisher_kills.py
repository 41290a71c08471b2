"""A publisher process that is killed repeatedly at random moments, on real files, keeps flushed messages."""

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rt
from rt.log.check.verify import verify

KILLS = 20
SEED = random.randrange(2**32)
"""Drawn for each run. The assertions print it, so that a failure can be repeated."""

PROGRAM = """
import os, random, sys
import rt

root, seed = sys.argv[1], int(sys.argv[2])
draw = random.Random(seed)
publisher = rt.Publisher(
    root, "stream", publisher_id="feed", batch_bytes=8192, roll_bytes=256 * 1024,
    linger_ms=draw.choice([0, 1, 50]),
    fsync=draw.choice(["batch", "interval", "never"]), compression=draw.choice([None, "zstd"]),
)

def value(number):
    return b"%d:" % number + bytes([number % 251]) * (number * 7919 % 3000)

while True:
    first = publisher.next_number
    for number in range(first, first + draw.randrange(1, 40)):
        publisher.publish(value(number), topic=f"t{number % 5}")
    first = publisher.next_number
    publisher.publish_many([value(number) for number in range(first, first + draw.randrange(1, 40))])
    if draw.random() < 0.5:
        publisher.flush()
        os.write(1, b"%d\\n" % publisher.next_number)
"""


def value(number: int) -> bytes:
    return b"%d:" % number + bytes([number % 251]) * (number * 7919 % 3000)


def flushed_until_killed(root: Path, draw: random.Random) -> int:
    """Let a process publish and kill it at a random moment; return the last number that it reported as
    flushed.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, root, str(draw.randrange(2**32))], stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    said = b""
    for _ in range(draw.randrange(1, 12)):
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready, "the publisher said nothing for a minute"
        chunk = os.read(process.stdout.fileno(), 65536)
        assert chunk, "the publisher ended by itself"
        said += chunk
    spin = draw.randrange(20_000)
    while spin:  # A short delay, so that the kill falls between two reports.
        spin -= 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    said += process.stdout.read()
    process.stdout.close()
    return int(said[: said.rindex(b"\n")].rsplit(b"\n", 1)[-1])


@pytest.mark.slow
def test_publisher_killed_repeatedly_loses_no_flushed_message(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    promised = 0
    for _ in range(KILLS):
        flushed = flushed_until_killed(tmp_path, draw)
        assert flushed > promised, SEED
        promised = flushed
    with rt.Publisher(tmp_path, "stream", publisher_id="feed") as publisher:
        end = publisher.next_number
    assert end >= promised
    with rt.LogReader(publisher.directory) as reader:
        expected = 0
        for message in reader:
            assert message.number == expected, SEED
            assert message.value == value(expected), SEED
            expected += 1
    assert expected == end
    report = verify(publisher.directory)
    assert report.damage == []
    assert {path.name.split(".")[1] for path in Path(publisher.directory).glob("log.*")} == {
        str(run) for run in range(KILLS + 1)
    }
