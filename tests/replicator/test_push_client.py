"""The push client against nodes that restart, reject, stall or report wrong offsets; majority arithmetic."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from disks import FaultyDisk
from hypothesis import given
from hypothesis import strategies as st
from push_node import CLUSTER, PushNode

import rt
from replicator.protocol.handshake import NOWHERE, PushProgress
from replicator.protocol.known_nodes import KnownNode, KnownNodes
from replicator.protocol.messages import CHUNK_BYTES_MAX, LogOffset
from replicator.push import stream, stream_faults
from replicator.push.client import PushClient
from replicator.push.lock import is_awaited, lock_push
from replicator.push.quorum_progress import NEAR_SEGMENTS, QuorumProgress, majority_level
from replicator.push.stream_faults import BACKOFF_SECONDS_MIN
from rt.errors import StorageFailed, TooManyFiles
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.sidecar.progress_file import NO_LEVEL, Level, ProgressRecord, PushState, read_progress

WAIT_SECONDS = 120


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; `TimeoutError` if it does not come."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def run(test: Awaitable[Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * WAIT_SECONDS):
            await test

    asyncio.run(bounded())


def publisher_in(root: Path, **options: Any) -> rt.Publisher:
    return rt.Publisher(root, "s", publisher_id="feed", **{"linger_ms": 0, **options})


@contextlib.asynccontextmanager
async def nodes(count: int = 3, **options: Any) -> AsyncIterator[list[PushNode]]:
    made = [PushNode(f"n{index + 1}", **options) for index in range(count)]
    try:
        for node in made:
            await node.start()
        yield made
    finally:
        for node in made:
            await node.stop()
        assert [node.faults for node in made] == [[] for _ in made]


@contextlib.asynccontextmanager
async def pushing(directory: str, made: list[PushNode], **options: Any) -> AsyncIterator[PushClient]:
    """Run a client and stop it at the end. The client must not fail before."""
    client = PushClient(directory, "s", [node.endpoint for node in made], insecure=True, **options)
    task = asyncio.create_task(client.run())
    try:
        yield client
        assert not task.done() or task.exception() is None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_published_bytes_reach_every_node_unchanged(tmp_path: Path) -> None:
    async def test() -> None:
        with publisher_in(tmp_path, roll_bytes=20_000) as publisher:
            async with nodes() as made, pushing(publisher.directory, made) as client:
                for count in range(50):
                    publisher.publish_many([b"%d" % count * 100] * 10, topic="t")
                    await asyncio.sleep(0)
                publisher.flush()
                await until(lambda: all(node.holds(publisher.directory) for node in made))
                await until(lambda: published_levels(publisher) == [Level(0, 500)] * 2)
                assert all(len(node.sealed) == len(node.segments) - 1 for node in made)
                assert {hello.session for hello in made[0].hellos} == {"feed"}
                assert client._source is not None
                shared = client._source.read_cache
                await until(lambda: (len(shared._reads), len(shared._encoded)) == (0, 0))

    run(test())


def progress_of(publisher: rt.Publisher) -> ProgressRecord:
    record = read_progress(publisher.directory)
    assert record is not None
    return record


def published_levels(publisher: rt.Publisher) -> list[Level]:
    record = read_progress(publisher.directory)
    return [] if record is None else [record.replicated, record.merged]


def test_restarted_publisher_continues_in_its_next_run(tmp_path: Path) -> None:
    async def test() -> None:
        publisher_in(tmp_path).close()
        directory = str(tmp_path / "s" / "sessions" / "feed")
        async with nodes() as made, pushing(directory, made):
            for life in range(3):
                with publisher_in(tmp_path) as publisher:
                    publisher.publish(b"%d" % life)
                    publisher.flush()
                    await until(lambda: all(node.holds(directory) for node in made))
            assert sorted(made[0].lives) == [0, 1, 2, 3]
            assert [made[0].sealed[segment].is_last_of_run for segment in sorted(made[0].sealed)] == [
                True
            ] * 3

    run(test())


def test_unreachable_minority_blocks_nothing_and_catches_up_after_restart(tmp_path: Path) -> None:
    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with nodes() as made, pushing(publisher.directory, made):
                publisher.publish(b"before")
                await until(lambda: all(node.holds(publisher.directory) for node in made))
                await made[2].stop()
                made[2].cut_to_batches()
                publisher.publish_many([bytes(1000)] * 100)
                publisher.flush()
                await until(lambda: published_levels(publisher) == [Level(0, 101)] * 2)
                assert not made[2].holds(publisher.directory)
                await made[2].start()
                await until(lambda: made[2].holds(publisher.directory))

    run(test())


def test_replicated_level_waits_while_majority_is_unreachable(tmp_path: Path) -> None:
    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with nodes() as made, pushing(publisher.directory, made):
                made[0].merges = False
                for node in made[1:]:
                    await node.stop()
                publisher.publish(b"one")
                publisher.flush()
                await until(lambda: made[0].holds(publisher.directory))
                assert read_level(publisher) == NO_LEVEL
                await made[1].start()
                await until(lambda: read_level(publisher) == Level(0, 1))

    run(test())


def read_level(publisher: rt.Publisher) -> Level:
    record = read_progress(publisher.directory)
    return NO_LEVEL if record is None else record.replicated


def test_stalled_node_blocks_no_other_and_its_unacknowledged_bytes_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "UNACKNOWLEDGED_BYTES_MAX", 2**20)

    async def test() -> None:
        with publisher_in(tmp_path, roll_bytes=2**30) as publisher:
            async with nodes() as made:
                made[2].is_still = True
                async with pushing(publisher.directory, made) as client:
                    for _ in range(12):
                        publisher.publish_many([bytes(10_000)] * 100)
                    publisher.flush()
                    await until(lambda: all(node.holds(publisher.directory) for node in made[:2]))
                    assert client._streams.all[2]._unacknowledged_bytes <= 2**20 + CHUNK_BYTES_MAX
                    made[2].is_still = False
                    await until(lambda: made[2].holds(publisher.directory))

    run(test())


def recorded_pauses(monkeypatch: pytest.MonkeyPatch, *, longer: float = 0.001) -> list[float]:
    """Record the upper bound of each pause of a stream. The shortest pauses take 1 ms, the others take
    `longer`.
    """
    pauses: list[float] = []

    def drawn(_: float, longest: float) -> float:
        pauses.append(longest)
        return 0.001 if longest == BACKOFF_SECONDS_MIN else longer

    monkeypatch.setattr(stream_faults.random, "uniform", drawn)
    return pauses


def test_node_with_full_disk_is_retried_with_backoff_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It accepts the session each time, and ends the stream at the first bytes."""
    caplog.set_level("INFO", logger="replicator")
    pauses = recorded_pauses(monkeypatch)

    def logged(event: str) -> int:
        return sum(message.startswith(event) for message in caplog.messages)

    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with nodes() as made, pushing(publisher.directory, made) as client:
                publisher.publish(b"before")
                await until(lambda: all(node.holds(publisher.directory) for node in made))
                made[2].rejection = rt.DiskFull("disk full while writing a batch", where="/data")
                publisher.publish(b"after")
                await until(lambda: len(pauses) >= 10)
                # The first stream made progress before it ended. So only the second stream counts as a
                # repeated failure.
                doubled = [min(BACKOFF_SECONDS_MIN * 2**failures, 1.0) for failures in range(6)]
                assert pauses[1:7] == doubled
                assert (logged("push_waits"), logged("push_recovered")) == (2, 1)
                made[2].rejection = None
                await until(lambda: all(node.holds(publisher.directory) for node in made))
                await until(lambda: logged("push_recovered") == 2)
                assert not client.report.reasons
                tried = len(pauses)  # The stream may end and pause while the node stops.
                await made[2].stop()
                await until(lambda: len(pauses) > tried)
                assert pauses[tried] == BACKOFF_SECONDS_MIN

    run(test())


def test_restarted_node_is_retried_at_once_when_another_node_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No majority can store new messages without the restarted node."""
    pauses = recorded_pauses(monkeypatch, longer=10 * WAIT_SECONDS)

    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with nodes() as made, pushing(publisher.directory, made):
                publisher.publish(b"before")
                await until(lambda: all(node.holds(publisher.directory) for node in made))
                await made[2].stop()
                await until(lambda: pauses and pauses[-1] > BACKOFF_SECONDS_MIN)
                await made[2].start()
                await made[1].stop()
                publisher.publish(b"after")
                await until(lambda: made[2].holds(publisher.directory))
                await until(lambda: published_levels(publisher)[0] == Level(0, 2))

    run(test())


def test_nodes_that_end_each_stream_do_not_reset_backoff_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = recorded_pauses(monkeypatch)

    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with nodes() as made, pushing(publisher.directory, made):
                publisher.publish(b"before")
                await until(lambda: all(node.holds(publisher.directory) for node in made))
                for node in made[1:]:
                    node.rejection = rt.DiskFull("disk full while writing a batch", where="/data")
                publisher.publish(b"after")
                await until(lambda: pauses.count(stream_faults.BACKOFF_SECONDS_MAX) >= 20)
                short = pauses.count(BACKOFF_SECONDS_MIN)
                await until(lambda: pauses.count(stream_faults.BACKOFF_SECONDS_MAX) >= 40)
                assert pauses.count(BACKOFF_SECONDS_MIN) == short

    run(test())


def test_batch_larger_than_unacknowledged_limit_is_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "UNACKNOWLEDGED_BYTES_MAX", 2**20)

    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with (
                nodes(1, members=1) as made,
                pushing(publisher.directory, made),
            ):
                publisher.publish(bytes(100))
                publisher.publish(bytes(5 * 2**20))
                publisher.publish(bytes(100))
                publisher.flush()
                await until(lambda: made[0].holds(publisher.directory))

    run(test())


def test_node_starting_after_its_own_bytes_counts_as_holding_merged_messages(tmp_path: Path) -> None:
    async def test() -> None:
        for number in range(2):
            with publisher_in(tmp_path) as publisher:
                publisher.publish(b"%d" % number)
        async with nodes(1, members=1) as made:
            end = len(Path(publisher.directory, "log.1.0").read_bytes())
            made[0].lie = LogOffset(1, 0, end)
            made[0].merged_elsewhere = PushProgress(LogOffset(0, 0, 64), 0, 1, 2, LogOffset(1, 0, end))
            client = PushClient(publisher.directory, "s", [made[0].endpoint], insecure=True)
            client.finish()
            await client.run()
            assert not made[0].segments

    run(test())


def test_chunks_are_not_sent_before_their_run_is_open(tmp_path: Path) -> None:
    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with nodes(1, members=1) as made:
                made[0].opens_lives = False
                async with pushing(publisher.directory, made):
                    publisher.publish(b"one")
                    publisher.flush()
                    await until(lambda: made[0].lives)
                    await asyncio.sleep(0)
                    assert not made[0].segments
                    made[0].opens_lives = True
                    await made[0].stop()
                    await made[0].start()
                    await until(lambda: made[0].holds(publisher.directory))

    run(test())


def test_node_reporting_invalid_offset_is_dropped_and_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with nodes() as made:
                made[2].lie = LogOffset(0, 0, 77)
                async with pushing(publisher.directory, made):
                    publisher.publish(b"one")
                    publisher.flush()
                    await until(lambda: read_level(publisher) == Level(0, 1))
                    await until(lambda: "no batch or block of this log ends" in caplog.text)
                    made[2].lie = None
                    await until(lambda: made[2].holds(publisher.directory))

    with caplog.at_level(logging.WARNING, "replicator"):
        run(test())


def test_node_with_wiped_disk_does_not_count_before_it_has_everything_again(tmp_path: Path) -> None:
    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with nodes() as made, pushing(publisher.directory, made) as client:
                publisher.publish(b"one")
                publisher.flush()
                await until(lambda: all(node.holds(publisher.directory) for node in made))
                await made[1].stop()
                made[1].forget()
                made[1].opens_lives = False
                await made[1].start()
                log = client._source
                assert log is not None
                await until(lambda: log.quorum.durable("n2") == NOWHERE)
                assert read_level(publisher) == Level(0, 1)
                made[1].opens_lives = True
                await made[1].stop()
                await made[1].start()
                await until(lambda: made[1].holds(publisher.directory))

    run(test())


def test_rejection_by_one_node_is_retried_and_by_all_nodes_ends_client(tmp_path: Path) -> None:
    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with nodes() as made:
                made[0].refusal = rt.Fenced("a newer incarnation took over")
                client = PushClient(publisher.directory, "s", [node.endpoint for node in made], insecure=True)
                task = asyncio.create_task(client.run())
                publisher.publish(b"one")
                publisher.flush()
                await until(lambda: read_level(publisher) == Level(0, 1))
                await until(lambda: len(made[0].hellos) > 1)
                for node in made[1:]:
                    node.refusal = made[0].refusal
                    await node.stop()
                    await node.start()
                with pytest.raises(rt.Fenced, match="newer incarnation"):
                    await task
                record = progress_of(publisher)
                assert (record.state, record.replicated) == (PushState.FENCED, Level(0, 1))

    run(test())


def test_run_closed_by_cluster_raises_fenced_and_next_run_continues(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes() as made:
            for node in made:
                node.lie = LogOffset(1, 0, 0)
            with publisher_in(tmp_path) as publisher:
                publisher.publish(b"lost")
                publisher.flush()
                client = PushClient(publisher.directory, "s", [node.endpoint for node in made], insecure=True)
                with pytest.raises(rt.Fenced, match="nothing more of this run"):
                    await client.run()
                assert client._source is not None
                assert not client._source._epochs  # Nothing is kept about nodes that the client left.
                assert progress_of(publisher).state is PushState.FENCED
            with publisher_in(tmp_path) as publisher:
                async with pushing(publisher.directory, made):
                    number = publisher.publish(b"kept")
                    publisher.flush()
                    await until(lambda: read_level(publisher) == Level(1, number + 1))
            assert all(SegmentId(0, 0) not in node.segments for node in made)

    run(test())


def test_session_fenced_by_majority_ends_client_while_others_are_unreachable(tmp_path: Path) -> None:
    async def test() -> None:
        async with nodes() as made:
            for node in made[:2]:
                node.refusal = rt.Fenced("another one took over")
            await made[2].stop()
            with publisher_in(tmp_path) as publisher:
                client = PushClient(publisher.directory, "s", [node.endpoint for node in made], insecure=True)
                with pytest.raises(rt.Fenced, match="another one took over"):
                    await client.run()

    run(test())


def test_fence_by_one_of_two_nodes_ends_client_only_if_other_is_unreachable(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with nodes(2) as made:
            made[0].refusal = rt.Overloaded("later")
            with publisher_in(tmp_path) as publisher:
                client = PushClient(publisher.directory, "s", [node.endpoint for node in made], insecure=True)
                task = asyncio.create_task(client.run())
                publisher.publish(b"one")
                publisher.flush()
                await until(lambda: made[1].holds(publisher.directory))
                made[0].refusal = rt.Fenced("another one took over")
                asked = len(made[0].hellos)
                await until(lambda: len(made[0].hellos) > asked + 2)
                assert not task.done()
                await made[1].stop()
                with pytest.raises(rt.Fenced, match="another one took over"):
                    await task

    run(test())


def test_push_to_another_cluster_raises_cluster_mismatch_and_sends_no_bytes(tmp_path: Path) -> None:
    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            publisher.publish(b"one")
            publisher.flush()
            async with nodes(1, members=1) as made, pushing(publisher.directory, made):
                await until(lambda: made[0].holds(publisher.directory))
            async with nodes(1, members=1, cluster=b"another cluster!") as others:
                client = PushClient(publisher.directory, "s", [others[0].endpoint], insecure=True)
                cluster_file = Path(publisher.directory, ".cluster")
                with pytest.raises(
                    rt.ClusterMismatch, match=f"`endpoints`.*remove {cluster_file}, then start it"
                ):
                    await client.run()
                assert not others[0].segments
                assert others[0].hellos[0].cluster == CLUSTER
                assert progress_of(publisher).state is PushState.REFUSED

                cluster_file.unlink()
                others[0].merges = False
                async with pushing(publisher.directory, others):
                    await until(lambda: others[0].holds(publisher.directory))
                    await until(lambda: others[0].cluster == progress_of(publisher).cluster)
                # The message was merged in the other cluster.
                assert progress_of(publisher).merged == NO_LEVEL

    run(test())


def test_corrupt_session_log_raises_corrupt_with_offset(tmp_path: Path) -> None:
    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            publisher.publish(bytes(100))
            publisher.flush()
            with open(Path(publisher.directory, "log.0.0"), "r+b") as file:
                file.seek(100)
                file.write(b"\xff\xff")
            async with nodes(1, members=1) as made:
                client = PushClient(publisher.directory, "s", [made[0].endpoint], insecure=True)
                with pytest.raises(rt.Corrupt) as caught:
                    await client.run()
                assert caught.value.offset == 64

    run(test())


def test_finishing_client_ends_when_majority_has_everything(tmp_path: Path) -> None:
    async def test() -> None:
        publisher = publisher_in(tmp_path)
        async with nodes() as made:
            made[0].merges = made[2].merges = False
            made[1].is_still = made[2].is_still = True
            client = PushClient(publisher.directory, "s", [node.endpoint for node in made], insecure=True)
            task = asyncio.create_task(client.run())
            publisher.publish_many([bytes(100)] * 1000)
            publisher.close()
            client.finish()
            await until(lambda: made[0].holds(publisher.directory))
            assert not task.done()
            made[2].is_still = False
            await task
            assert made[2].holds(publisher.directory)

    run(test())


def test_second_client_raises_directory_locked_or_waits_for_first_to_finish(tmp_path: Path) -> None:
    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            async with nodes() as made:
                for node in made:
                    node.is_still = True
                endpoints = [node.endpoint for node in made]
                publisher.publish(b"x")
                publisher.flush()
                first = PushClient(publisher.directory, "s", endpoints, insecure=True)
                serving = asyncio.create_task(first.run())
                await until(lambda: made[0].hellos)
                with pytest.raises(rt.DirectoryLocked):
                    await PushClient(publisher.directory, "s", endpoints, insecure=True).run()
                second = PushClient(publisher.directory, "s", endpoints, insecure=True, waits=True)
                waiting = asyncio.create_task(second.run())
                await until(lambda: is_awaited(publisher.directory))
                assert not serving.done()
                first.finish()
                await serving  # It stops without draining, so that the second client can start.
                for node in made:
                    node.is_still = False
                await until(lambda: all(node.holds(publisher.directory) for node in made))
                second.finish()
                await waiting
                lock_push(publisher.directory).close()

    run(test())


def test_missing_or_duplicate_endpoints_raise_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no endpoint is named"):
        PushClient(tmp_path, "s", [])
    with pytest.raises(ValueError, match="named twice"):
        PushClient(tmp_path, "s", ["a:1", "a:1"])


def test_push_of_merged_log_raises_invalid_name(tmp_path: Path) -> None:
    from rt.testing.merged import MergedLogBuilder

    MergedLogBuilder(tmp_path / "merged", cluster_id=CLUSTER, stream="s").close()
    with pytest.raises(rt.InvalidName, match="only a session"):
        run(PushClient(tmp_path / "merged", "s", ["localhost:1"], insecure=True).run())


# Levels

levels = st.builds(Level, st.integers(0, 3), st.integers(0, 9))


@given(st.lists(levels, max_size=7), st.integers(1, 7))
def test_majority_level_is_highest_level_reached_by_majority(said: list[Level], members: int) -> None:
    said = said[:members]
    by_subsets = [min(group) for group in itertools.combinations(said, members // 2 + 1)]
    assert majority_level(said, members) == max(by_subsets, default=NO_LEVEL)


def test_node_counts_once_and_nodes_without_report_count_as_empty() -> None:
    levels = QuorumProgress()
    assert (levels.replicated, levels.merged, levels.members) == (NO_LEVEL, NO_LEVEL, 0)
    for _ in range(2):
        levels.start("n1", 3, None)
        levels.report("n1", PushProgress(LogOffset(1, 0, 64), 9))
    assert levels.replicated == NO_LEVEL
    levels.start("n2", 3, LogOffset(1, 0, 64))
    levels.report("n2", PushProgress(LogOffset(1, 0, 64), 7, 1, 5))
    assert (levels.replicated, levels.merged) == (Level(1, 7), Level(1, 5))
    levels.start("n3", 5, None)
    assert levels.replicated == Level(1, 5)  # Two of five are no majority, but merged messages had one.


def test_merged_messages_missing_on_connected_node_are_counted_unless_it_lags_far() -> None:
    levels = QuorumProgress()
    end = LogOffset(1, NEAR_SEGMENTS, 640)
    for node, durable, number in (
        ("n1", end, 100),
        ("n2", LogOffset(1, 0, 64), 30),
        ("n3", LogOffset(0, 0, 64), 10),
    ):
        levels.start(node, 3, None)
        levels.report(node, PushProgress(durable, number, 1, 100, end))
    assert levels.lacking == 70
    levels.report("n2", PushProgress(LogOffset(1, 3, 64), 60, 1, 100, end))
    assert levels.lacking == 40
    levels.remove("n2")
    assert levels.lacking == 0
    levels.start("n2", 3, LogOffset(1, 3, 64))
    assert levels.lacking == 0
    levels.report("n2", PushProgress(LogOffset(1, 3, 64), 60, 1, 100, end))
    assert levels.lacking == 40
    levels.report("n1", PushProgress(end, 100, 1, 100, LogOffset(1, NEAR_SEGMENTS + 4, 64)))
    assert levels.lacking == 0


def test_progress_of_node_stops_counting_when_its_stream_ends() -> None:
    """Its disk may have been replaced when it returns."""
    levels = QuorumProgress()
    for node, number in (("n1", 5), ("n2", 9)):
        levels.start(node, 3, None)
        levels.report(node, PushProgress(LogOffset(0, 0, 64), number))
    assert levels.replicated == Level(0, 5)
    levels.remove("n2")
    levels.report("n1", PushProgress(LogOffset(0, 0, 128), 9))
    assert levels.replicated == NO_LEVEL
    levels.start("n2", 3, None)
    levels.report("n2", PushProgress(LogOffset(0, 0, 64), 5))
    assert levels.replicated == Level(0, 5)


def test_replicated_level_needs_majority_of_known_members_only() -> None:
    levels = QuorumProgress()
    for node, number in (("n1", 9), ("n2", 8), ("n3", 4)):
        levels.start(node, 3, None)
        levels.report(node, PushProgress(LogOffset(0, 0, 64), number))
    assert (levels.replicated, levels.majority) == (Level(0, 8), 2)
    levels.known = known_nodes("n2", "n3", "n4")  # n1 has left.
    assert (levels.replicated, levels.majority) == (Level(0, 4), 2)
    levels.known = known_nodes("n2", "n3", "n4", "n5")
    assert (levels.replicated, levels.majority) == (NO_LEVEL, 3)
    levels.start("n4", 4, None)
    levels.report("n4", PushProgress(LogOffset(0, 0, 64), 6))
    assert levels.replicated == Level(0, 4)
    levels.known = known_nodes("n2")
    assert (levels.replicated, levels.members) == (Level(0, 8), 1)
    levels.report("n1", PushProgress(LogOffset(0, 0, 64), 9, 0, 9, LogOffset(0, 0, 64)))
    # The messages are committed, whichever node reports it.
    assert levels.replicated == levels.merged == Level(0, 9)


@given(
    st.dictionaries(st.sampled_from(["n1", "n2", "n3", "n4", "n5"]), st.integers(0, 9)),
    st.sets(st.sampled_from(["n1", "n2", "n3", "n4", "n5"]), min_size=1),
)
def test_replicated_level_is_highest_number_held_by_majority_of_members(
    said: dict[str, int], members: set[str]
) -> None:
    levels = QuorumProgress()
    for node, number in said.items():
        levels.start(node, 5, None)
        levels.report(node, PushProgress(LogOffset(0, 0, 64), number))
    levels.known = known_nodes(*members)

    def holders(number: int) -> int:
        return sum(said.get(node, 0) >= number for node in members)

    most = max(number for number in range(10) if 2 * holders(number) > len(members) or not number)
    assert levels.replicated == Level(0, most)


def known_nodes(*names: str) -> KnownNodes:
    return KnownNodes(tuple(KnownNode(name, f"{name}:1") for name in sorted(names)), 1)


def test_level_of_higher_run_is_higher_at_any_number() -> None:
    assert majority_level([Level(2, 0), Level(1, 90), Level(2, 5)], 3) == Level(2, 0)


def test_run_is_not_sent_to_any_node_if_directory_sync_fails(tmp_path: Path) -> None:
    async def test() -> None:
        with publisher_in(tmp_path) as publisher:
            publisher.publish(b"a")
            publisher.flush()
            disk = FaultyDisk(REAL)
            disk.fail("sync_directory", times=100)
            async with nodes() as made:
                endpoints = [node.endpoint for node in made]
                client = PushClient(publisher.directory, "s", endpoints, insecure=True, disk=disk)
                with pytest.raises(rt.StorageFailed, match="syncing a session's directory"):
                    await client.run()
                assert [node.lives for node in made] == [{}] * 3
                async with pushing(publisher.directory, made):
                    await until(lambda: all(node.lives for node in made))

    run(test())


# Removed directories


@pytest.mark.parametrize("is_reachable", [True, False])
@pytest.mark.parametrize("is_finishing", [False, True])
@pytest.mark.parametrize("is_moved", [False, True])
def test_removed_session_directory_ends_push_with_log_not_found(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    is_reachable: bool,
    is_finishing: bool,
    is_moved: bool,
) -> None:
    async def test() -> None:
        publisher = publisher_in(tmp_path)
        publisher.publish(b"one")
        publisher.close()
        async with nodes() as made:
            endpoints = [node.endpoint for node in made]
            if not is_reachable:
                for node in made:
                    await node.stop()
            client = PushClient(publisher.directory, "s", endpoints, insecure=True)
            task = asyncio.create_task(client.run())
            await until(lambda: client._source is not None)
            if is_reachable:
                await until(lambda: all(node.holds(publisher.directory) for node in made))
            if is_moved:
                os.rename(publisher.directory, tmp_path / "elsewhere")
            else:
                shutil.rmtree(publisher.directory)
            if is_finishing:
                client.finish()
            with pytest.raises(rt.LogNotFound, match="the session's directory was removed") as caught:
                await asyncio.wait_for(task, WAIT_SECONDS)
            assert publisher.directory in str(caught.value)

    run(test())
    assert "session_directory_removed" in caplog.text


def test_recreated_session_directory_ends_old_client_and_is_pushed_by_new_one(tmp_path: Path) -> None:
    async def test() -> None:
        publisher_in(tmp_path).close()
        directory = str(tmp_path / "s" / "sessions" / "feed")
        async with nodes() as made:
            client = PushClient(directory, "s", [node.endpoint for node in made], insecure=True)
            task = asyncio.create_task(client.run())
            await until(lambda: client._source is not None)
            shutil.rmtree(directory)
            with publisher_in(tmp_path) as publisher:
                publisher.publish(b"anew")
                publisher.flush()
                with pytest.raises(rt.RtError):
                    await asyncio.wait_for(task, WAIT_SECONDS)
                async with pushing(directory, made):
                    await until(lambda: all(node.holds(directory) for node in made))

    run(test())


def test_own_log_read_passes_too_many_files_and_raises_local_log_failed_otherwise() -> None:
    def refused() -> None:
        raise TooManyFiles("no file descriptor left")

    def failed() -> None:
        raise StorageFailed("the disk failed")

    with pytest.raises(TooManyFiles):
        stream_faults.read_own_log(refused)
    with pytest.raises(stream_faults.LocalLogFailed):
        stream_faults.read_own_log(failed)
