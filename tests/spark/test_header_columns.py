"""The `headers` column of the Spark source and sink: read, checked, packed and spooled, without Spark."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from merged_logs import Feeds
from pyspark.sql.types import ArrayType, StructType

import rt
from rt.log.format.headers import HEADERS_BYTES_MAX, HEADERS_MAX, Headers
from rt.log.read.projection import Projection
from rt.log.read.range_reader import RangeReader
from rt.spark.data_source import RtDataSource
from rt.spark.sink.packed_headers import HEADERS, pack_headers, unpack_headers
from rt.spark.sink.row_order import order_of
from rt.spark.sink.spool import Spool, SpooledRow, check_written_columns
from rt.spark.source import arrow_batches
from rt.spark.source.arrow_batches import BYTES_MAX, gather
from rt.spark.source.columns import HEADERS_KIND

DRAWN: tuple[Headers, ...] = (
    (),
    (("trace", b"\x00\xff"),),
    (("source", b"A"), ("source", b"B")),
    (("ärger", b""), ("k" * 300, b"v" * 1000)),
)
ALL = ("position", "topic", "headers", "value")


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    """Yield batches with equal headers, with different headers, with one header set for all messages, and
    without headers.
    """
    made = Feeds(tmp_path)
    draw = random.Random(11)
    for number in range(60):
        count = draw.randint(1, 30)
        own = draw.choice([DRAWN, DRAWN[:1], DRAWN[1:2], DRAWN[:2]])
        headers = [draw.choice(own) for _ in range(count)]
        if number % 7 == 0:
            headers = [(("number", b"%d" % n),) for n in range(count)]
        values = [draw.randbytes(draw.randint(0, 50)) for _ in range(count)]
        topic = draw.choice(["t", "u"])
        made.publish(draw.choice("abc"), values, topic, range(count), headers if any(headers) else ())
    made.merge()
    yield made
    made.close()


def rows(path: str, start: int, end: int, columns: Sequence[str], **interest: object) -> list[dict[str, Any]]:
    reader = RangeReader(path, start, end, interest=Projection(**interest), on_loss=lambda _: None)  # type: ignore[arg-type]
    found = list(gather(reader.batches(), columns))
    for batch in found:
        batch.validate(full=True)
    return [row for batch in found for row in batch.to_pylist()]


def as_rows(messages: Sequence[rt.Message]) -> list[dict[str, Any]]:
    return [
        {
            "position": each.position,
            "topic": each.topic,
            "headers": [{"key": key, "value": value} for key, value in each.headers] or None,
            "value": each.value,
        }
        for each in messages
    ]


@pytest.mark.parametrize("bytes_max", [BYTES_MAX, 4096, 1])
def test_headers_column_has_headers_of_each_message_or_null(
    feeds: Feeds, monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    monkeypatch.setattr(arrow_batches, "BYTES_MAX", bytes_max)
    messages = feeds.rows()
    assert {bool(each.headers) for each in messages} == {True, False}
    end = len(messages)
    assert rows(feeds.path, 0, end, ALL) == as_rows(messages)
    assert rows(feeds.path, 7, end - 3, ALL) == as_rows(messages[7:-3])
    of_topic = [each for each in messages if each.topic == "u"]
    assert rows(feeds.path, 0, end, ALL, topics=frozenset("u")) == as_rows(of_topic)


def test_large_headers_give_record_batches_of_bounded_size(
    feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_max = 2**20
    monkeypatch.setattr(arrow_batches, "BYTES_MAX", bytes_max)
    first = len(feeds.rows())
    feeds.publish("a", [b""] * 200, "t", range(200), [(("big", b"v" * 60_000),)] * 200)
    feeds.merge()
    reader = RangeReader(feeds.path, first, first + 200, on_loss=lambda _: None)
    made = list(gather(reader.batches(), ("headers",)))
    assert sum(batch.num_rows for batch in made) == 200
    assert all(batch.nbytes <= 1.1 * bytes_max for batch in made)


def test_headers_of_filtered_out_messages_do_not_accumulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row keeps the headers of its whole batch in memory, so all of them count."""
    monkeypatch.setattr(arrow_batches, "BYTES_MAX", 2**20)
    feeds = Feeds(tmp_path, ["a"])
    with rt.Publisher(tmp_path, "s", publisher_id="b", linger_ms=60_000, fsync="never") as publisher:
        for batch in range(20):
            publisher.publish(b"", "u", headers={"k": b"%d" % batch})
            for number in range(5):
                publisher.publish(b"", "t", headers={"k": bytes([batch, number]) * 30_000})
            publisher.flush()
        feeds.log.merge_all([publisher.directory])
    reader = RangeReader(
        feeds.path, 0, 120, interest=Projection(topics=frozenset("u")), on_loss=lambda _: None
    )
    made = list(gather(reader.batches(), ("headers",)))
    got = [headers[0]["value"] for batch in made for headers in batch["headers"].to_pylist()]
    assert got == [b"%d" % batch for batch in range(20)]
    assert max(batch.num_rows for batch in made) <= 4
    feeds.close()


def test_headers_column_of_log_without_headers_is_null(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    feeds.fill(5)
    found = rows(feeds.path, 0, len(feeds.rows()), ("headers",))
    assert found == [{"headers": None}] * len(feeds.rows())
    feeds.close()


# The option


def source(path: str, columns: str, **options: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns without a user's schema, and the rows of a query for `columns`."""
    data_source = RtDataSource({"path": path, **options})
    schema = StructType()
    for name in columns.split():
        kind = ArrayType(StructType().add("key", "string").add("value", "binary"))
        schema.add(name, kind if name == "headers" else "long")
    reader = data_source.reader(schema)
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    return [part.split()[0] for part in str(data_source.schema()).split(", ")], found


def test_include_headers_option_adds_column(feeds: Feeds) -> None:
    plain = ["position", "timestamp", "session", "number", "topic", "value"]
    wanted = [{"headers": row["headers"]} for row in as_rows(feeds.rows())]
    assert source(feeds.path, "headers", includeHeaders="true") == ([*plain, "headers"], wanted)
    assert source(feeds.path, "headers") == (plain, wanted)
    assert source(feeds.path, "position", includeheaders="FALSE")[0] == plain


def test_include_headers_option_is_rejected_if_invalid_or_schema_has_no_column(feeds: Feeds) -> None:
    with pytest.raises(
        rt.InvalidOption, match="includeHeaders is true, but the schema has no column headers"
    ):
        source(feeds.path, "position", includeHeaders="true")
    with pytest.raises(rt.InvalidOption, match="includeHeaders cannot be 'yes': expected false or true"):
        source(feeds.path, "position", includeHeaders="yes")


# Rows on their way to a log

NAMES = st.text(min_size=1, max_size=5)
DRAWN_HEADERS = st.lists(st.tuples(NAMES, st.binary(max_size=5)), max_size=4).map(tuple)


def column(headers: Sequence[Headers | None]) -> pa.Array:
    """Return the headers as Spark passes them."""
    pairs = [None if each is None else [{"key": k, "value": v} for k, v in each] for each in headers]
    return pa.array(pairs, HEADERS)


@given(st.lists(st.none() | DRAWN_HEADERS, max_size=12), st.integers(0, 5))
def test_packed_headers_round_trip(headers: list[Headers | None], start: int) -> None:
    packed = pack_headers(column(headers)[start:], start)
    packed.validate(full=True)
    assert [unpack_headers(each) for each in packed.to_pylist()] == [each or () for each in headers[start:]]


def test_headers_exceeding_cache_size_round_trip() -> None:
    headers = tuple((f"key{n}", bytes([n]) * 100) for n in range(HEADERS_MAX))
    (packed,) = pack_headers(column([headers]), 0).to_pylist()
    assert unpack_headers(packed) == headers


def test_header_types_with_large_offsets_are_accepted() -> None:
    large = pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.large_binary())]))
    packed = pack_headers(column(DRAWN).cast(large), 0)
    assert [unpack_headers(each) for each in packed.to_pylist()] == list(DRAWN)


def pairs_of(keys: pa.Array, values: pa.Array) -> pa.Array:
    """Return three rows: without headers, with all of these headers, and without headers."""
    pairs = pa.StructArray.from_arrays([keys, values], ["key", "value"])
    ends = pa.array([0, 0, len(keys), len(keys)], pa.int32())
    return pa.ListArray.from_arrays(ends, pairs)


TOO_MANY = [("k", b"")] * (HEADERS_MAX + 1)
INVALID_TEXT = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"k\xff")]
)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (pairs_of(pa.array(["a", None]), pa.array([b"", b""])), "a header's key is null"),
        (pairs_of(pa.array(["a", "b"]), pa.array([b"", None])), "the value of header 'b' is null"),
        (pa.array([[], [{"key": "a", "value": b""}, None]], HEADERS), "a header is null"),
        (pairs_of(pa.array(["a", ""]), pa.array([b"", b""])), "a header has an empty key"),
        (pairs_of(INVALID_TEXT, pa.array([b"", b""])), r"a header's key b'\\xff' is not UTF-8"),
        (pairs_of(INVALID_TEXT, pa.array([b"", None])), r"the value of header .*xff' is null"),
        (column([(), tuple(TOO_MANY), ()]), "too many headers .*: got 129, expected at most 128"),
        (
            column([(), (("big", bytes(HEADERS_BYTES_MAX - 2)),), ()]),
            "too large .*: got 65537 bytes of keys and values, expected at most 65536",
        ),
    ],
)
def test_invalid_headers_are_rejected_with_row_number(tmp_path: Path, given: pa.Array, error: str) -> None:
    before = pa.record_batch([pa.array([b"v"] * 40)], names=["value"])
    batch = pa.record_batch([pa.array([b"v"] * len(given)), given], names=["value", "headers"])
    with Spool(str(tmp_path), None) as spool, pytest.raises(rt.InvalidHeader, match=error) as found:
        spool.fill([before, batch])
    assert found.value.where == "column headers, row 41"


def test_maximum_number_and_bytes_of_headers_are_accepted() -> None:
    most = tuple(("k", b"") for _ in range(HEADERS_MAX))
    large = (("big", bytes(HEADERS_BYTES_MAX - 3)),)
    packed = pack_headers(column([most, large]), 0)
    assert [unpack_headers(each) for each in packed.to_pylist()] == [most, large]


def spooled(path: Path, headers: Sequence[Headers | None]) -> Spool:
    """Return rows that differ only in their headers."""
    spool = Spool(str(path), "t")
    batches = []
    for at in range(0, len(headers), 3):
        part = headers[at : at + 3]
        batches.append(pa.record_batch([pa.array([b"v"] * len(part)), column(part)], ["value", "headers"]))
    spool.fill(batches)
    return spool


def test_spooled_rows_keep_their_headers_in_any_order(tmp_path: Path) -> None:
    headers = [None, *DRAWN, *DRAWN[::-1]]
    made = [SpooledRow(b"v", "t", None, each or ()) for each in headers]
    with spooled(tmp_path, headers) as spool:
        assert list(spool.rows(None)) == made
        order = np.random.default_rng(3).permutation(len(made))
        assert list(spool.rows(order)) == [made[at] for at in order]


def test_repeated_partition_with_other_headers_raises_write_conflict(tmp_path: Path) -> None:
    first: list[Headers | None] = [(("a", b"1"), ("b", b"2")), None, (("a", b"1"),)]
    others: list[list[Headers | None]] = [
        [(("a", b"1"), ("b", b"3")), None, (("a", b"1"),)],
        [(("b", b"2"), ("a", b"1")), None, (("a", b"1"),)],
        [(("a", b"1b2"),), None, (("a", b"1"),)],
        [(("a", b"1"), ("b", b"2")), (("a", b"1"),), (("a", b"1"),)],
        [None, None, None],
    ]
    with spooled(tmp_path, first) as one:
        with spooled(tmp_path, [(), first[2], first[0]]) as again:
            order = order_of(one.digests, again.digests, where="here")
            assert order is not None
            assert order.tolist() == [2, 0, 1]
        for other in others:
            with (
                spooled(tmp_path, other) as changed,
                pytest.raises(rt.WriteConflict, match="the write was repeated with other rows"),
            ):
                order_of(one.digests, changed.digests, where="here")


def test_rows_with_empty_headers_have_same_digests_as_rows_without_headers_column(tmp_path: Path) -> None:
    with spooled(tmp_path, [None, (), None]) as one, Spool(str(tmp_path), "t") as plain:
        plain.fill([pa.record_batch([pa.array([b"v"] * 3)], names=["value"])])
        assert one.digests == plain.digests
        assert list(one.rows(None)) == list(plain.rows(None))


def test_row_digest_distinguishes_headers_from_topic_and_value(tmp_path: Path) -> None:
    (packed,) = pack_headers(column([(("a", b"b"),)]), 0).to_pylist()
    found = set()
    for value, topic, own in [(b"", "", (("a", b"b"),)), (packed, "", ()), (b"", packed.decode(), ())]:
        with Spool(str(tmp_path), topic) as spool:
            spool.fill([pa.record_batch([pa.array([value]), column([own])], names=["value", "headers"])])
            found.add(bytes(spool.digests))
    assert len(found) == 3


def test_headers_column_of_wrong_type_is_rejected() -> None:
    check_written_columns([("value", "binary"), ("headers", HEADERS_KIND)], topic=None)
    for kind in ("array<struct<key:string,value:string>>", "map<string,binary>"):
        with pytest.raises(rt.InvalidOption) as error:
            check_written_columns([("value", "binary"), ("headers", kind)], topic=None)
        assert f"column headers has the wrong type: got {kind}, expected {HEADERS_KIND}" in str(error.value)
        assert "map_entries" in str(error.value)
