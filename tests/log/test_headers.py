"""Message headers: from publish to the reader, their limits, and hostile bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from batches import Said, batch, columns, draft, forge
from hypothesis import given
from hypothesis import strategies as st

import rt
from replicator.protocol.column_check import BadColumns, check_columns
from rt.log.format.batch import CODEC_NONE, CODEC_ZSTD, HEADER, HEADERS_FLAG, BatchHeader, encode_batch
from rt.log.format.constants import BATCH_BYTES_MAX
from rt.log.format.headers import (
    COPIES_BYTES_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_MAX,
    SETS_MAX,
    Headers,
    encode_headers,
    headers_of_each,
)
from rt.log.write.batcher import PendingBatch

keys = st.sampled_from(["k", "traceparent", "größe"]) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9
)
headers = st.lists(st.tuples(keys, st.binary(max_size=9)), max_size=5).map(tuple)


def published(path: Path, **options: object) -> list[rt.Message]:
    with rt.LogReader(path / "s" / "sessions" / "p") as reader:
        return list(reader)


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.binary(max_size=20), headers), min_size=1),
    st.sampled_from([None, "zstd"]),
    st.booleans(),
)
def test_messages_are_read_with_published_headers(
    tmp_path_factory: pytest.TempPathFactory,
    sent: list[tuple[str, bytes, Headers]],
    compression: object,
    flushes: bool,
) -> None:
    path = tmp_path_factory.mktemp("logs")
    with rt.Publisher(
        path,
        "s",
        publisher_id="p",
        compression=compression,
        linger_ms=1000,
        fsync="never",  # type: ignore[arg-type]
    ) as publisher:
        for topic, value, own in sent:
            publisher.publish(value, topic, headers=own)
            if flushes:
                publisher.flush()
        publisher.publish_many([b"1", b"2"], headers={"all": b"same"})
        publisher.publish_many([b"3", b"4"], headers=[(), [("own", b"x"), ("own", b"y")]])
        publisher.publish_many([bytes(9000)] * 40, "bulk")
    got = published(path)
    more: list[Headers] = [(("all", b"same"),)] * 2 + [(), (("own", b"x"), ("own", b"y"))]
    assert [(one.topic, one.value, one.headers) for one in got[: len(sent)]] == sent
    assert [one.headers for one in got[len(sent) :]] == more + [()] * 40
    with rt.LogReader(path / "s" / "sessions" / "p") as reader:
        rows = [row for each in reader.batches() for row in each.to_arrow()["headers"].to_pylist()]
    assert rows == [[{"key": key, "value": value} for key, value in one.headers] for one in got]


def test_headers_set_batch_flag_and_leave_columns_unchanged() -> None:
    said = [Said("t", b"v")]
    plain = batch(said)
    assert struct.unpack_from("<H", plain, 16) == (CODEC_NONE,)
    own = draft(said)._replace(headers=encode_headers([(("k", b"v"),)], None))
    with_headers = b"".join(encode_batch(own, first=0, seed=0))
    assert struct.unpack_from("<H", with_headers, 16) == (HEADERS_FLAG,)
    assert with_headers[64 : 64 + 40] == plain[64 : 64 + 40]


def test_repeated_headers_are_stored_once_per_batch(tmp_path: Path) -> None:
    value = b"once-in-a-batch" * 10
    with rt.Publisher(tmp_path, "s", publisher_id="p", linger_ms=60_000) as publisher:
        for number in range(100):
            publisher.publish(b"%d" % number, headers={"trace-key": value})
    data = (tmp_path / "s/sessions/p/log.0.0").read_bytes()
    assert (data.count(value), data.count(b"trace-key")) == (1, 1)
    assert {one.headers for one in published(tmp_path)} == {(("trace-key", value),)}


def test_batches_are_split_before_header_copies_exceed_limit(tmp_path: Path) -> None:
    large = {"k": bytes(HEADERS_BYTES_MAX - 1)}
    count = 2 * COPIES_BYTES_MAX // HEADERS_BYTES_MAX
    with rt.Publisher(tmp_path, "s", publisher_id="p", linger_ms=60_000) as publisher:
        publisher.publish_many([b"v"] * count, headers=large)
    with rt.LogReader(tmp_path / "s" / "sessions" / "p") as reader:
        sizes = [len(each) for each in reader.batches()]
    assert sum(sizes) == count
    assert max(sizes) < COPIES_BYTES_MAX // HEADERS_BYTES_MAX


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"": b"v"}, rt.InvalidHeader, "empty key"),
        ({"\ud800": b"v"}, rt.InvalidHeader, "not valid Unicode"),
        ([("k", b"v")] * (HEADERS_MAX + 1), rt.InvalidHeader, "too many headers"),
        ({"k": bytes(HEADERS_BYTES_MAX)}, rt.InvalidHeader, "too large"),
        ({"k": "text"}, TypeError, "encode it"),
        ({1: b"v"}, TypeError, "must be str"),
    ],
)
def test_invalid_headers_are_rejected_and_consume_no_number(
    tmp_path: Path, wrong: dict[str, bytes], error: type[Exception], words: str
) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="p") as publisher:
        with pytest.raises(error, match=words):
            publisher.publish(b"v", headers=wrong)
        with pytest.raises(error, match=words):
            publisher.publish_many([b"v"], headers=wrong)
        assert publisher.next_number == 0
    assert published(tmp_path) == []


def test_headers_of_each_with_wrong_count_raises_invalid_header() -> None:
    with pytest.raises(rt.InvalidHeader, match="got 1 sets, expected 2"):
        headers_of_each([{"k": b"v"}], 2)


def test_message_size_limit_includes_headers(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="p") as publisher:
        with pytest.raises(rt.MessageTooLarge):
            publisher.publish(bytes(256 * 2**20), headers={"k": b"v"})
        assert publisher.next_number == 0


@pytest.mark.parametrize("codec", [CODEC_NONE, CODEC_ZSTD])
def test_large_headers_shared_by_many_messages_raise_bad_columns(codec: int) -> None:
    count = 100_000
    plain = draft([Said("t", b"")] * count)
    large = encode_headers([(("k", bytes(HEADERS_BYTES_MAX - 1)),)], None)
    data = b"".join(encode_batch(plain._replace(headers=large), first=0, seed=0, codec=codec))
    header = BatchHeader._make(HEADER.unpack_from(data))
    with pytest.raises(BadColumns, match="if each message has its own"):
        check_columns(header, memoryview(data))


@pytest.mark.parametrize("codec", [CODEC_NONE, CODEC_ZSTD])
def test_many_unused_header_sets_with_long_keys_raise_bad_columns(codec: int) -> None:
    unused: list[Headers] = [(("k" * 60_000, b""),)] * 1000
    section = encode_headers([(), *unused], np.zeros(1, np.uint16))
    own = draft([Said("t", b"")])._replace(headers=section)
    data = b"".join(encode_batch(own, first=0, seed=0, codec=codec))
    with pytest.raises(BadColumns, match="if each message has its own"):
        check_columns(BatchHeader._make(HEADER.unpack_from(data)), memoryview(data))


def test_batch_full_of_header_sets_has_room_for_message_without_headers() -> None:
    pending = PendingBatch(0)
    topic = pending.add_topic("t")
    for number in range(SETS_MAX + 1):
        own = (("k", number.to_bytes(4, "little")),)
        if not pending.has_room("t", 16, BATCH_BYTES_MAX, own):
            break
        pending.add_many([b""], [0], topic | pending.add_headers(own), 16)
    assert pending.has_room("t", 16, BATCH_BYTES_MAX)
    pending.add_many([b""], [0], topic, 16)
    data = b"".join(encode_batch(pending.draft(), first=0, seed=0))
    header = BatchHeader._make(HEADER.unpack_from(data))
    assert header.message_count == SETS_MAX
    check_columns(header, memoryview(data))


def test_headers_after_large_compressed_values_are_validated() -> None:
    noise = np.random.default_rng(1).bytes(2**20) + bytes(2 * 2**20)
    for key, is_good in (("k", True), ("", False)):
        own = draft([Said("t", noise)])._replace(headers=encode_headers([((key, b"v"),)], None))
        data = b"".join(encode_batch(own, first=0, seed=0, codec=CODEC_ZSTD))
        header = BatchHeader._make(HEADER.unpack_from(data))
        assert header.flags == CODEC_ZSTD | HEADERS_FLAG
        if is_good:
            check_columns(header, memoryview(data))
            continue
        with pytest.raises(BadColumns, match="empty key"):
            check_columns(header, memoryview(data))


def test_header_index_out_of_range_raises_bad_columns() -> None:
    section = bytearray(encode_headers([(), (("k", b"v"),)], np.array([0, 1], np.uint16)))
    at = section.index(b"\0\0\1\0k")
    section[at + 2] = 2
    data = forge(
        columns([0, 0, 0], [0, 0], [], [0, 1], b"t"), bytes(section), message_count=2, flags=HEADERS_FLAG
    )
    with pytest.raises(BadColumns, match="header index"):
        check_columns(BatchHeader._make(HEADER.unpack_from(data)), memoryview(data))
