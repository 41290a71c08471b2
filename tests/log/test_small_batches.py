"""Small batches verified together give the same result as batches verified one by one."""

import random

import pytest
from batches import Said, batch, forge, session_bytes, session_header
from batches import columns as columns_of
from hypothesis import given
from hypothesis import strategies as st

from rt.log.format.batch import CODEC_ZSTD, BadBatch
from rt.log.format.checksum import batch_seed
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.log.scan.scanner import read_batch
from rt.log.scan.small_batches import BATCHES_MIN, find_run

HEADER = session_header(first=7)


def session(count: int, *, codec: int = 0) -> bytes:
    """One to three messages a batch, of one or two topics."""
    draw = random.Random(count)
    runs = [
        [
            Said(draw.choice(["a", "bb"]), draw.randbytes(draw.randint(0, 40)), draw.randint(0, 99))
            for _ in range(n)
        ]
        for n in draw.choices([1, 2, 3], k=count)
    ]
    return session_bytes(HEADER, runs, codecs=[codec] * count)


def good_batches(data: bytes, *, values: bool) -> list[tuple[int, int, int]]:
    """Return the offset, message count and first number of the batches that verify one by one."""
    found, at, following = [], 0, 7
    view = memoryview(data)
    while at < len(data):
        try:
            header = read_batch(
                view, at, len(data), batch_seed(HEADER.seed, SEGMENT_HEADER_BYTES + at), values
            )
        except BadBatch:
            break
        if isinstance(header, int) or header.first != following:
            break
        found.append((at, header.message_count, header.first))
        following += header.message_count
        at += header.total_bytes
    return found


def together(data: bytes, *, values: bool) -> list[tuple[int, int, int]]:
    run, _ = find_run(memoryview(data), 0, len(data), HEADER.seed, SEGMENT_HEADER_BYTES, values=values)
    if run is None:
        return []
    return list(zip(run.starts.tolist(), run.counts.tolist(), run.numbers.tolist(), strict=True))


@pytest.mark.parametrize("count", [BATCHES_MIN, 40, 300])
@pytest.mark.parametrize("values", [True, False])
def test_group_verification_finds_all_consecutive_small_batches(count: int, values: bool) -> None:
    data = session(count)
    found = together(data, values=values)
    assert found == good_batches(data, values=values)
    assert len(found) == count


@given(at=st.integers(0, 10**9), flipped=st.integers(1, 255), values=st.booleans())
def test_group_and_single_verification_stop_at_same_changed_byte(at: int, flipped: int, values: bool) -> None:
    data = bytearray(session(60))
    data[at % len(data)] ^= flipped
    alone = good_batches(bytes(data), values=values)
    assert together(bytes(data), values=values) in (alone, [], alone[: len(alone)])
    if len(alone) >= BATCHES_MIN:
        assert together(bytes(data), values=values) == alone


@given(cut=st.integers(0, 10**9))
def test_group_verification_stops_before_truncated_batch(cut: int) -> None:
    whole = session(60)
    data = whole[: cut % len(whole) & -8]
    alone = good_batches(data, values=True)
    assert together(data, values=True) == (alone if len(alone) >= BATCHES_MIN else [])


def test_group_verification_skips_few_large_or_compressed_batches() -> None:
    assert together(session(BATCHES_MIN - 1), values=True) == []
    large = session_bytes(HEADER, [[Said("t", bytes(9000))]] * 40)
    assert together(large, values=True) == []
    squeezed = session_bytes(HEADER, [[Said("t", bytes(500))]] * 40, codecs=[CODEC_ZSTD] * 40)
    assert together(squeezed, values=True) == []


@pytest.mark.parametrize(
    "said",
    [
        {"message_count": 0},
        {"message_count": 2},
        {"topic_count": 0},
        {"topic_count": 2},
        {"flags": 16},
        {"magic": 1},
        {"first": 2**62},
        {"first": -1},
        {"columns_bytes": 31},
        {"values_bytes": 1},
    ],
)
def test_group_verification_stops_before_forged_header_with_valid_checksum(said: dict[str, int]) -> None:
    data = b""
    for number in range(40):
        seed = batch_seed(HEADER.seed, SEGMENT_HEADER_BYTES + len(data))
        if number == 20:
            part = columns_of([0, 0], [5], [], [0, 1], b"t")[: 4 + 4 + 8 + 8 + 1]
            data += forge(part, seed=seed, **{"first": 27, **said})
        else:
            data += batch([Said("t", b"v")], first=7 + number, seed=seed)
    found = together(data, values=True)
    assert found == good_batches(data, values=True)[: len(found)]
    assert len(found) <= 20
