"""Comparing copies of a log: where the first difference is, and that lag and trimming are not one."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from batches import Said, batch
from msgspec.structs import replace

import rt
from rt.log.check.compare import PIECE_BYTES, Comparison, compare
from rt.log.disk import REAL
from rt.log.format.checksum import batch_seed
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason, encode_table
from rt.log.scan.directory import list_segments, read_header, read_table, scans
from rt.log.scan.scanner import scanner_for
from rt.log.write.writer import LogWriter
from rt.testing.merged import MergedLogBuilder

CLUSTER = b"cluster of test."


def publish(root: Path, batches: int, *, start: int = 0, session: str = "feed", size: int = 2000) -> Path:
    """Publish batches of three messages, one batch a segment."""
    with rt.Publisher(
        root, "s", publisher_id=session, roll_bytes=3 * size, linger_ms=60_000, batch_bytes=16 * 2**20
    ) as publisher:
        for batch in range(start, start + batches):
            publisher.publish_many([b"%d" % batch + bytes(size)] * 3, timestamps_ns=[batch] * 3)
            publisher.flush()
    return Path(publisher.directory)


def copy(source: Path, name: str) -> Path:
    return Path(shutil.copytree(source, source.parent / name))


def cut(directory: Path, *, keep: int) -> None:
    """Restore the state of the log when it had `keep` segments of one batch, the last of them active."""
    table = read_table(REAL, str(directory))
    assert table is not None
    for segment in sorted(directory.glob("log.0.*"), key=lambda path: int(path.suffix[1:]))[keep:]:
        segment.unlink()
    (directory / "durable").write_bytes(bytes(128))
    (directory / "segments").write_bytes(encode_table(replace(table, segments=table.segments[: keep - 1])))


def trim(directory: Path, before: SegmentId) -> None:
    table = read_table(REAL, str(directory))
    assert table is not None
    writer = LogWriter.open(str(directory), table.identity)
    writer.trim(before, TrimReason.TIME)
    writer.close()


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def where(comparison: Comparison) -> list[tuple[str, str, str | None, int, int | None]]:
    return [
        (
            Path(difference.path).name,
            Path(difference.other).name,
            None if difference.segment is None else str(difference.segment),
            difference.offset,
            difference.position,
        )
        for difference in comparison.differences
    ]


def test_identical_copy_has_no_difference(tmp_path: Path) -> None:
    source = publish(tmp_path, 4)
    found = compare([source, copy(source, "copy")])
    assert found.differences == ()
    assert found.compared_bytes == sum(path.stat().st_size for path in source.glob("log.*"))
    assert [(log.start, log.end) for log in found.logs] == [(0, 12), (0, 12)]


def test_comparing_single_log_raises_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two log directories"):
        compare([publish(tmp_path, 1)])


def test_lagging_log_has_no_difference(tmp_path: Path) -> None:
    source = publish(tmp_path, 4)
    behind = copy(source, "behind")
    cut(behind, keep=3)
    newest = behind / "log.0.2"
    newest.write_bytes(newest.read_bytes()[:64])
    for paths in ([source, behind], [behind, source]):
        found = compare(paths)
        assert found.differences == ()
        assert {log.end for log in found.logs} == {12, 6}


def test_torn_tail_has_no_difference(tmp_path: Path) -> None:
    source = publish(tmp_path, 2)
    torn = copy(source, "torn")
    cut(torn, keep=2)
    newest = torn / "log.0.1"
    newest.write_bytes(newest.read_bytes()[:-100] + b"other")
    assert compare([source, torn]).differences == ()


@pytest.mark.parametrize("offset", [0, 63, 64, 100, 5000])
def test_corrupt_byte_is_reported_with_its_offset_and_batch_position(tmp_path: Path, offset: int) -> None:
    source = publish(tmp_path, 4)
    other = copy(source, "other")
    flip(other / "log.0.1", offset)
    flip(other / "log.0.2", 200)
    assert where(compare([source, other])) == [("other", "feed", "log.0.1", offset, 3)]
    assert where(compare([other, source])) == [("feed", "other", "log.0.1", offset, 3)]


def test_corrupt_log_of_three_is_reported_and_others_are_compared_to_their_end(tmp_path: Path) -> None:
    source = publish(tmp_path, 4)
    odd, even = copy(source, "odd"), copy(source, "even")
    flip(odd / "log.0.1", 70)
    found = compare([source, odd, even])
    assert where(found) == [("odd", "feed", "log.0.1", 70, 3)]
    assert found.compared_bytes == sum(path.stat().st_size for path in source.glob("log.*"))


def test_corrupt_bytes_below_durable_end_of_active_segment_are_reported(tmp_path: Path) -> None:
    source = publish(tmp_path, 1)
    other = copy(source, "other")
    flip(other / "log.0.0", 70)
    assert where(compare([source, other])) == [("other", "feed", "log.0.0", 70, 0)]


def test_difference_in_second_piece_of_large_segment_is_reported(tmp_path: Path) -> None:
    source = publish(tmp_path, 2, size=600_000)
    other = copy(source, "other")
    flip(other / "log.0.1", PIECE_BYTES + 17)
    assert where(compare([source, other])) == [("other", "feed", "log.0.1", PIECE_BYTES + 17, 3)]


def test_logs_of_two_incarnations_are_reported_as_two_logs(tmp_path: Path) -> None:
    source, other = publish(tmp_path / "a", 1), publish(tmp_path / "b", 1)
    (difference,) = compare([source, other]).differences
    assert difference.segment is None
    assert "two logs" in difference.what


def test_sealed_segment_longer_in_another_copy_differs_at_its_end(tmp_path: Path) -> None:
    source = publish(tmp_path, 2)
    other = copy(source, "other")
    publish(tmp_path, 1, start=2)
    size = (source / "log.0.1").stat().st_size
    cut(other, keep=2)
    with (other / "log.0.1").open("ab") as longer:
        longer.write(continued(other))
    assert where(compare([source, other]))[0][:4] == ("feed", "other", "log.0.1", size)


def continued(directory: Path) -> bytes:
    """Return one more batch that verifies after the end of the newest segment."""
    newest = list_segments(REAL, str(directory))[-1]
    header = read_header(REAL, str(directory), newest)
    assert header is not None
    seed = batch_seed(header.seed, (directory / str(newest)).stat().st_size)
    return batch([Said("", b"more")], first=6, seed=seed)


def test_segment_missing_between_others_differs_at_offset_0(tmp_path: Path) -> None:
    source = publish(tmp_path, 4)
    for is_listed in (True, False):
        other = copy(source, f"other{is_listed}")
        (other / "log.0.1").unlink()
        if not is_listed:
            (other / "segments").unlink()
        found = compare([source, other])
        assert where(found)[0][:4] == (f"other{is_listed}", "feed", "log.0.1", 0)


def test_truncated_sealed_segment_differs_at_its_end(tmp_path: Path) -> None:
    source = publish(tmp_path, 4)
    other = copy(source, "other")
    path = other / "log.0.1"
    path.write_bytes(path.read_bytes()[:3000])
    for paths in ([source, other], [other, source]):
        assert where(compare(paths)) == [("other", "feed", "log.0.1", 3000, 3)]


def test_trimmed_segments_have_no_difference(tmp_path: Path) -> None:
    source = publish(tmp_path, 5)
    trimmed = copy(source, "trimmed")
    trim(trimmed, SegmentId(0, 3))
    for paths in ([source, trimmed], [trimmed, source]):
        found = compare(paths)
        assert found.differences == ()
        assert found.compared_bytes == sum((source / f"log.0.{roll}").stat().st_size for roll in (3, 4))
        assert sorted((log.start, len(log.kept)) for log in found.logs) == [(0, 5), (9, 2)]


def test_trimmed_segment_of_another_length_differs(tmp_path: Path) -> None:
    source = publish(tmp_path, 3)
    other = copy(source, "other")
    trim(other, SegmentId(0, 1))
    table = read_table(REAL, str(other))
    assert table is not None
    wrong = replace(table.segments[0], size_bytes=table.segments[0].size_bytes - 8)
    (other / "segments").write_bytes(encode_table(replace(table, segments=(wrong, *table.segments[1:]))))
    (difference,) = compare([source, other]).differences
    assert difference.segment == SegmentId(0, 0)


def test_trimmed_segment_of_copy_with_shorter_end_before_gap_has_no_difference(tmp_path: Path) -> None:
    source = publish(tmp_path, 4)
    other = copy(source, "other")
    trim(source, SegmentId(0, 2))
    trim(other, SegmentId(0, 2))
    table = read_table(REAL, str(other))
    assert table is not None
    had = replace(table.segments[0], end=table.segments[0].end - 1, size_bytes=100)
    (other / "segments").write_bytes(encode_table(replace(table, segments=(had, *table.segments[2:]))))
    assert compare([source, other]).differences == ()


# Merged logs


def merged(path: Path, sessions: list[Path], rounds: int, *, upset: bool = False) -> Path:
    with MergedLogBuilder(path, cluster_id=CLUSTER, stream="s") as log:
        for index in range(rounds):
            for session in reversed(sessions) if upset and index == 2 else sessions:
                log.merge(session)
            if index % 2:
                log.roll()
    return path


@pytest.fixture
def sessions(tmp_path: Path) -> list[Path]:
    return [publish(tmp_path, 4, session=name) for name in ("a", "b")]


def test_merged_logs_of_same_instructions_are_byte_identical(tmp_path: Path, sessions: list[Path]) -> None:
    found = compare([merged(tmp_path / name, sessions, 4) for name in ("n1", "n2", "n3")])
    assert found.differences == ()
    assert found.compared_bytes > 4 * 2 * 6000
    assert (tmp_path / "n1" / "log.0.1").read_bytes() == (tmp_path / "n2" / "log.0.1").read_bytes()


def test_merged_log_of_lagging_node_has_no_difference(tmp_path: Path, sessions: list[Path]) -> None:
    found = compare([merged(tmp_path / name, sessions, rounds) for name, rounds in (("n1", 4), ("n2", 3))])
    assert found.differences == ()
    assert [log.end for log in found.logs] == [24, 18]


def test_merged_logs_in_different_order_differ_at_first_reordered_block(
    tmp_path: Path, sessions: list[Path]
) -> None:
    first = merged(tmp_path / "n1", sessions, 4)
    second = merged(tmp_path / "n2", sessions, 4, upset=True)
    (difference,) = compare([first, second]).differences
    assert (difference.segment, difference.position) == (SegmentId(0, 1), 12)


# Live logs


@pytest.mark.slow
def test_logs_have_no_difference_while_written_rolled_and_trimmed(
    tmp_path: Path, sessions: list[Path]
) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="c", batch_bytes=20_000) as publisher:
        for _ in range(20):
            publisher.publish_many([bytes(1000)] * 100)
    header = read_header(REAL, publisher.directory, SegmentId(0, 0))
    assert header is not None
    file = REAL.open(f"{publisher.directory}/log.0.0")
    places = [b.offset for scan in scans(file.pread, scanner_for(header)) for b in scan.batches]
    file.close()
    logs = [MergedLogBuilder(tmp_path / name, cluster_id=CLUSTER, stream="s") for name in ("n1", "n2")]
    done: list[bool] = []

    def write() -> None:
        for index, start in enumerate(places[:-1]):
            for lag, log in enumerate(logs):
                if index >= lag:
                    log.merge(publisher.directory, places[index - lag], places[index - lag + 1])
                    if (index - lag) % 10 == 9:
                        log.roll()
            if index % 15 == 14:
                logs[0].trim(SegmentId(0, index // 20))
            assert start >= 64
        done.append(True)

    writer = threading.Thread(target=write)
    writer.start()
    is_over = False
    try:
        while not is_over:
            is_over = bool(done) or not writer.is_alive()
            assert compare([log.path for log in logs]).differences == ()
    finally:
        writer.join()
    assert done
    for log in logs:
        log.close()
    assert compare([log.path for log in logs]).differences == ()
