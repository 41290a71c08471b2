"""The run of a message distinguishes numbers that are reused after a power loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from disks import MemoryDisk

import rt
from rt.cli.formats.envelope import envelopes
from rt.cli.formats.log_dump import message_lines
from rt.cli.formats.writers import Polled
from rt.log.check.verify import verify
from rt.log.disk import Disk
from rt.log.read.projection import EVERYTHING, Projection
from rt.log.read.range_reader import RangeReader
from rt.log.scan.message_batch import MessageBatch
from rt.testing.merged import MergedLogBuilder

MERGED = "/merged"


def publish(disk: Disk, count: int, what: bytes, *, is_synced: bool) -> str:
    """Publish a run of the session "feed" with one message a batch; return its directory."""
    settings: Any = {"linger_ms": 60_000, "fsync": "never", "disk": disk}
    publisher = rt.Publisher("/root", "stream", publisher_id="feed", **settings)
    for number in range(count):
        assert publisher.publish(what + b"%d" % number) == number
        publisher._writer.write_batch()
    if is_synced:
        publisher.close()
    else:
        publisher._abandon()
    return publisher.directory


def carry(source: MemoryDisk, target: MemoryDisk, directory: str, names: list[str]) -> None:
    """Copy the files of a session to the node's disk, as replicators do."""
    target.make_directory(directory)
    for name in names:
        target.write(f"{directory}/{name}", source.read(f"{directory}/{name}"))


@pytest.fixture(scope="module")
def disk() -> MemoryDisk:
    """Return the disk of a node that has merged two runs of one session. The second run repeats numbers of
    the first.
    """
    own, node = MemoryDisk(), MemoryDisk()
    directory = publish(own, 40, b"lost here ", is_synced=False)
    with MergedLogBuilder(MERGED, cluster_id=b"cluster of test.", stream="stream", disk=node) as merged:
        carry(own, node, directory, ["log.0.0", "segments"])
        merged.merge(directory)
        own = own.after_power_cut("none")
        assert publish(own, 30, b"anew ", is_synced=True) == directory
        carry(own, node, directory, ["log.1.0"])
        merged.merge(directory)
        assert merged.position == 70
    return node


WANTED = [(0, number, b"lost here %d" % number) for number in range(40)] + [
    (1, number, b"anew %d" % number) for number in range(30)
]


def read_each(disk: MemoryDisk) -> list[rt.Message]:
    with rt.LogReader(MERGED, disk=disk) as reader:
        return list(reader)


def read_columns(disk: MemoryDisk) -> list[rt.Message]:
    with rt.LogReader(MERGED, disk=disk) as reader:
        return [message for batch in reader.batches() for message in of_arrow(batch)]


def of_arrow(batch: MessageBatch) -> list[rt.Message]:
    rows = batch.to_arrow().to_pylist()
    return [
        rt.Message(row["position"], 0, row["session"], row["run"], row["number"], row["topic"], row["value"])
        for row in rows
    ]


def read_range(interest: Projection) -> Callable[[MemoryDisk], list[rt.Message]]:
    def read(disk: MemoryDisk) -> list[rt.Message]:
        reader = RangeReader(MERGED, 0, 70, interest=interest, on_loss=pytest.fail, disk=disk)
        return [message for batch in reader.batches() for message in batch.messages()]

    return read


@pytest.mark.parametrize(
    "read",
    [read_each, read_columns, read_range(EVERYTHING), read_range(Projection(topics=frozenset({""})))],
    ids=["messages", "columns", "range", "topics of a range"],
)
def test_numbers_reused_after_power_loss_are_distinguished_by_run(
    disk: MemoryDisk, read: Callable[[MemoryDisk], list[rt.Message]]
) -> None:
    found = read(disk)
    assert [(one.run, one.number, one.value) for one in found] == WANTED
    assert {one.session for one in found} == {"feed"}
    assert len({(one.session, one.run, one.number) for one in found}) == 70


def test_verify_finds_no_problem_in_log_with_reused_numbers(disk: MemoryDisk) -> None:
    assert verify(MERGED, disk=disk).all_problems == []


def test_session_log_messages_have_run_of_their_segment() -> None:
    disk = MemoryDisk()
    for _ in range(3):
        with rt.Publisher("/root", "stream", publisher_id="feed", disk=disk) as publisher:
            publisher.publish_many([b"a", b"b"])
    with rt.LogReader(publisher.directory, disk=disk) as reader:
        assert [(one.run, one.number) for one in reader] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]


def test_run_is_shown_in_json_and_in_dump(disk: MemoryDisk) -> None:
    rows = Polled(read_each(disk))
    said = [json.loads(line) for line in envelopes(rows.messages())]
    assert [(one["run"], one["number"], one["value"].encode()) for one in said] == WANTED
    lines = list(message_lines(rows))
    assert b"feed/0#29 " in lines[29]
    assert b"feed/1#29 " in lines[69]


def test_run_is_kept_in_batch_slices_and_selections(disk: MemoryDisk) -> None:
    (batch,) = RangeReader(MERGED, 0, 70, on_loss=pytest.fail, disk=disk).batches()
    assert batch.runs.tolist() == [0] * 40 + [1] * 30
    assert batch.slice(39, 41).runs.tolist() == [0, 1]
    assert [one.run for one in batch.select(batch.numbers == 7).messages()] == [0, 1]
    assert (batch.session_names, batch.session_runs) == (("feed", "feed"), (0, 1))
    assert batch.to_arrow()["session"].dictionary.to_pylist() == ["feed"]
