"""Epoch checks of clients, copies and nodes: earlier epochs and rival forced resets are rejected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from batches import CLUSTER
from log_items import publish
from msgspec.structs import replace

from replicator.protocol.epoch_check import check_epoch, check_line
from replicator.protocol.handshake import PullStart, PushProgress, PushStart
from replicator.protocol.messages import LogOffset
from replicator.pull.local_copy import EPOCH_FILE, LocalCopy
from replicator.push.session_source import SessionSource
from rt.cluster_epoch import epoch_of, line_of
from rt.errors import ClusterMismatch, Corrupt, RtError
from rt.log.disk import REAL
from rt.net.grpc_errors import Unreachable

FORCED = epoch_of(1 << 16, 5)
RIVAL = epoch_of(1 << 16, 6)
FORCED_AGAIN = epoch_of(2 << 16, 3)


@pytest.mark.parametrize(
    ("known", "epoch", "outcome"),
    [
        (0, 0, False),
        (0, 1, True),
        (1, 1, False),
        (1, 2, True),
        (2, 1, Unreachable),
        (7, FORCED, True),
        (FORCED, FORCED + 1, True),
        (FORCED, 7, Unreachable),
        (FORCED, RIVAL, ClusterMismatch),
        (FORCED + 3, RIVAL + 4, ClusterMismatch),
        (FORCED, FORCED_AGAIN, True),
        (FORCED_AGAIN, RIVAL, Unreachable),
    ],
)
def test_check_epoch_accepts_later_and_rejects_earlier_or_rival_epochs(
    known: int, epoch: int, outcome: bool | type[RtError]
) -> None:
    if isinstance(outcome, bool):
        assert check_epoch(known, epoch, "n1") == outcome
    else:
        with pytest.raises(outcome):
            check_epoch(known, epoch, "n1")


def test_check_line_rejects_epochs_of_another_line() -> None:
    check_line(None, RIVAL, "n1")
    check_line(line_of(FORCED), FORCED + 9, "n1")
    for other in (RIVAL, FORCED_AGAIN, 1):
        with pytest.raises(Unreachable):
            check_line(line_of(FORCED), other, "n1")


# Copies


def start(epoch: int) -> PullStart:
    return PullStart(CLUSTER, epoch, "n1", LogOffset(0, 0, 0), 0)


def test_reopened_copy_rejects_earlier_and_rival_epochs(tmp_path: Path) -> None:
    for follows, refused in (
        (1, {}),
        (FORCED, {}),
        (FORCED + 1, {1: Unreachable, RIVAL: ClusterMismatch}),
        (FORCED_AGAIN, {FORCED: Unreachable}),
        (FORCED_AGAIN, {FORCED + 1: Unreachable, RIVAL: Unreachable}),
    ):
        copy = LocalCopy(tmp_path, "s")
        copy.open()
        for epoch, error in refused.items():
            with pytest.raises(error):
                copy.start(start(epoch))
        copy.start(start(follows))
        copy.close()


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b'"1"', b"9223372036854775808"])
def test_unreadable_epoch_file_raises_corrupt(tmp_path: Path, content: bytes) -> None:
    copy = LocalCopy(tmp_path, "s")
    copy.start(start(1))
    copy.close()
    (tmp_path / EPOCH_FILE).write_bytes(content)
    with pytest.raises(Corrupt):
        LocalCopy(tmp_path, "s").open()


# Pushes


def test_progress_before_and_after_forced_reset_is_never_counted_together(tmp_path: Path) -> None:
    said = PushProgress(LogOffset(0, 0, 128), 10)

    def begins(node: str, epoch: int) -> PushStart:
        return PushStart(CLUSTER, epoch, 3, node)

    async def play() -> None:
        log = SessionSource(publish(REAL, 10, root=str(tmp_path)), "s")
        log.start(begins("n1", 1))
        log.start(begins("n2", 2))
        log.report("n1", said)
        with pytest.raises(Unreachable):
            log.start(begins("n3", 1))
        log.start(begins("n3", FORCED))
        log.report("n3", said)
        assert log.quorum.replicated.number == 0, "the one that was left behind does not count any more"
        for node in ("n1", "n2"):
            with pytest.raises(Unreachable):
                log.report(node, said)
            log.remove(node)
        with pytest.raises(ClusterMismatch):
            log.start(begins("n1", RIVAL))
        log.start(begins("n2", FORCED + 1))
        log.report("n2", said)
        assert log.quorum.replicated.number == 10
        log.close()

    asyncio.run(play())


def test_restarted_push_rejects_earlier_and_rival_epochs(tmp_path: Path) -> None:
    directory = publish(REAL, 10, root=str(tmp_path))

    async def play(follows: int, refused: dict[int, type[RtError]]) -> None:
        log = SessionSource(directory, "s")
        for epoch, error in refused.items():
            with pytest.raises(error):
                log.start(PushStart(CLUSTER, epoch, 3, "n2"))
        log.start(PushStart(CLUSTER, follows, 3, "n1"))
        log.close()

    asyncio.run(play(1, {}))
    asyncio.run(play(FORCED, {}))
    asyncio.run(play(FORCED + 1, {1: Unreachable, RIVAL: ClusterMismatch}))
    asyncio.run(play(FORCED_AGAIN, {FORCED: Unreachable}))


def test_merged_bytes_are_pushed_after_forced_reset_to_node_missing_them(tmp_path: Path) -> None:
    end = LogOffset(0, 0, 128)
    merged = PushProgress(end, 10, merged=end, merged_run=0, merged_number=10)

    async def play() -> None:
        log = SessionSource(publish(REAL, 10, root=str(tmp_path)), "s")
        log.start(PushStart(CLUSTER, 1, 3, "n1"))
        log.report("n1", merged)
        assert log.quorum.safe("n2") == end, "others bring it"
        log.start(PushStart(CLUSTER, FORCED, 3, "n2"))
        assert log.quorum.safe("n2") < end, "nobody does"
        log.report("n2", PushProgress(end, 10))
        assert log.quorum.safe("n2") == end
        assert log.quorum.merged.number == 10, "what was told stays so"
        log.close()

    asyncio.run(play())


def test_start_with_epoch_above_int64_raises_value_error() -> None:
    replace(start(1), epoch=(1 << 63) - 1)
    with pytest.raises(ValueError, match="epoch"):
        replace(start(1), epoch=1 << 63)
