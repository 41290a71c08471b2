"""`rt log compare --spark`: broken guarantees are found within a segment and between adjacent segments."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from merged_logs import Feeds
from msgspec.structs import replace

import rt
from rt.log.disk import REAL
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from rt.log.scan.directory import read_header
from rt.log.scan.scanner import SessionScanner
from rt.spark.export.audit import FoundSegment, join
from rt.spark.export.audit_job import SegmentCopy, audit_segment
from rt.testing.merged import MergedLogBuilder


@pytest.fixture(scope="module")
def feeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feeds]:
    made = Feeds(tmp_path_factory.mktemp("audit"))
    for _ in range(4):
        made.fill(30)
        made.roll()
    yield made
    made.close()


def segments(feeds: Feeds) -> list[SegmentId]:
    return [SegmentId(0, roll) for roll in range(4)]


def copy_of(path: str, segment: SegmentId) -> SegmentCopy:
    return SegmentCopy(path, (Path(path) / segment.file_name).stat().st_size)


def look(path: str, segment: SegmentId, *others: str) -> FoundSegment:
    found = audit_segment(segment, [copy_of(each, segment) for each in (path, *others)])
    assert found is not None
    return found


def all_found(feeds: Feeds) -> list[FoundSegment]:
    return [look(feeds.path, segment) for segment in segments(feeds)]


def test_valid_log_has_no_problems(feeds: Feeds) -> None:
    found = all_found(feeds)
    assert [one.problems for one in found] == [[]] * 4
    assert list(join(found)) == []
    assert sum(one.message_count for one in found) == len(feeds.rows())
    assert {who.session for one in found for who in one.declared.values()} == {"a", "b", "c"}


def test_missing_middle_segment_is_reported(feeds: Feeds) -> None:
    first, _, third, _ = all_found(feeds)
    (problem,) = join([first, third])
    assert problem.what == f"starts at {third.first} where {first.end} must follow"


def test_session_continuing_at_wrong_offset_is_reported(feeds: Feeds) -> None:
    found = all_found(feeds)
    number, (first, last) = next(iter(found[2].drawn.items()))
    block = first.block._replace(source_offset=first.block.source_offset + 8)
    found[2].drawn[number] = (replace(first, block=block), last)
    (problem,) = join(found)
    assert "continues at log.0.0" in problem.what
    assert problem.path.endswith("log.0.2")


def test_session_continuing_with_wrong_running_checksum_is_reported(feeds: Feeds) -> None:
    found = all_found(feeds)
    number, (first, last) = next(iter(found[3].drawn.items()))
    found[3].drawn[number] = (replace(first, block=first.block._replace(chain_start=7)), last)
    (problem,) = join(found)
    assert "with the chain 0x00000007" in problem.what


def test_missing_or_repeated_message_number_is_reported(feeds: Feeds) -> None:
    for step in (-1, 1):
        found = all_found(feeds)
        number, (first, last) = next(iter(found[1].drawn.items()))
        header = first.first._replace(first=first.first.first + step)
        found[1].drawn[number] = (replace(first, first=header), last)
        (problem,) = join(found)
        assert f"number {header.first} of session" in problem.what


def test_conflicting_declaration_of_session_is_reported(feeds: Feeds) -> None:
    found = all_found(feeds)
    number, who = next(iter(found[1].declared.items()))
    found[1].declared[number] = replace(who, incarnation=bytes(16))
    assert any("is declared as" in problem.what for problem in join(found))


def test_non_dense_dedup_id_numbers_across_segments_are_reported() -> None:
    found = [
        FoundSegment(
            SegmentId(0, roll), f"log.0.{roll}", roll, roll + 1, dedup={"d": (roll * 5, roll * 5 + 5)}
        )
        for roll in range(3)
    ]
    assert list(join(found)) == []
    found[2].dedup["d"] = (9, 15)
    (problem,) = join(found)
    assert problem.what == "number 9 of dedup id d where 10 must follow"


def test_dedup_group_merged_from_alternating_sessions_has_no_problems(tmp_path: Path) -> None:
    twins = []
    for name in ("a", "b"):
        with rt.Publisher(
            tmp_path, "s", publisher_id=name, dedup_id="d", linger_ms=60_000, roll_bytes=12_000
        ) as publisher:
            for _ in range(6):
                publisher.publish_many([bytes(1500)] * 3)
                publisher.flush()
        twins.append(publisher.directory)
    with MergedLogBuilder(tmp_path / "merged", cluster_id=bytes(16), stream="s") as merged:
        merged.merge(twins[0], end=batch_end(twins[0]))
        merged.roll()
        merged.merge(twins[1])
        merged.merge(twins[0])
        merged.roll()
        merged.merge(twins[0], segment=SegmentId(0, 1))
        merged.merge_all(twins)
        assert merged.position == 18
    found = [look(merged.path, SegmentId(0, roll)) for roll in range(3)]
    assert [one.problems for one in found] == [[]] * 3
    assert list(join(found)) == []


def batch_end(session: str) -> int:
    """Return the offset at which the first batch of a session ends."""
    header = read_header(REAL, session, SegmentId(0, 0))
    assert header is not None
    content = (Path(session) / "log.0.0").read_bytes()[SEGMENT_HEADER_BYTES:]
    scan = SessionScanner(header).scan(memoryview(content))
    return SEGMENT_HEADER_BYTES + scan.batches[0].header.total_bytes


@pytest.mark.parametrize("seed", range(8))
def test_flipped_bit_in_copy_is_reported_with_its_file(feeds: Feeds, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    other = shutil.copytree(feeds.path, tmp_path / "other")
    segment = draw.choice(segments(feeds))
    path = other / segment.file_name
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)

    compared = look(feeds.path, segment, str(other))
    assert [(one.path, one.offset) for one in compared.problems] == [(str(path), place)]
    alone = look(str(other), segment)
    assert alone.problems[0].offset <= place


def test_corrupt_copy_is_reported_and_another_copy_is_verified_instead(feeds: Feeds, tmp_path: Path) -> None:
    other = shutil.copytree(feeds.path, tmp_path / "other")
    found = all_found(feeds)
    for roll, spoil in (
        (1, Path.unlink),
        (2, lambda path: path.write_bytes(path.read_bytes()[:-100] + bytes(100))),
    ):
        spoil(other / f"log.0.{roll}")
        segment = SegmentId(0, roll)
        again = audit_segment(segment, [SegmentCopy(str(other), 10**9), copy_of(feeds.path, segment)])
        assert again is not None
        assert [one.path for one in again.problems] == [str(other / segment.file_name)]
        assert (again.first, again.end, again.is_whole) == (found[roll].first, found[roll].end, True)
        found[roll] = again
    assert list(join(found)) == []


def test_truncated_copy_is_reported(feeds: Feeds, tmp_path: Path) -> None:
    other = shutil.copytree(feeds.path, tmp_path / "other")
    segment = SegmentId(0, 1)
    size = copy_of(feeds.path, segment).size_bytes
    with open(other / segment.file_name, "r+b") as file:
        file.truncate(size - 100)
    found = audit_segment(segment, [SegmentCopy(feeds.path, size), SegmentCopy(str(other), size)])
    assert found is not None
    assert [(one.what, one.offset) for one in found.problems] == [("cut off", size - 100)]


@pytest.mark.slow
def test_spark_audits_all_segments_of_all_copies(spark: object, feeds: Feeds, tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    from rt.cli.formats.log_check import audit_lines, audit_object
    from rt.spark.export.audit_job import audit

    assert isinstance(spark, SparkSession)
    other = shutil.copytree(feeds.path, tmp_path / "other")
    found = audit([feeds.path, str(other)], spark)
    assert found.problems == ()
    assert (found.segments, found.sessions, found.message_count) == (5, 3, len(feeds.rows()))
    assert "positions dense, sessions in order" in list(audit_lines(found))[-1]
    assert audit_object(found)["is_good"]

    (other / "log.0.2").unlink()
    found = audit([str(other), feeds.path], spark)
    assert [problem.path for problem in found.problems] == [str(other / "log.0.2")]
    with pytest.raises(rt.LogNotFound, match="not a merged log"):
        audit([feeds._publishers["a"].directory], spark)
