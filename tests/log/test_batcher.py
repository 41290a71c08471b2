"""Values of `publish_many` are cut into full batches, every value once and in order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rt.log.format.batch import BatchDraft
from rt.log.format.constants import BATCH_BYTES_MAX
from rt.log.format.headers import SETS_MAX
from rt.log.scan.header_table import read_headers
from rt.log.write.batcher import (
    MESSAGE_COST_BYTES,
    TOPIC_COST_BYTES,
    BulkMessages,
    PendingBatch,
    rest_bytes,
)

BATCH_BYTES = 4096
TOPICS = st.sampled_from(["", "a", "trade" * 40])
SIZES = st.lists(st.integers(0, 3000), max_size=12)


def messages(draft: BatchDraft) -> list[tuple[bytes, int, str]]:
    """Return the value, timestamp and topic of each message in the draft."""
    count = len(draft.offsets) - 1
    at = [0] * count if draft.topic_index is None else draft.topic_index
    return [
        (
            bytes(draft.values[draft.offsets[i] : draft.offsets[i + 1]]),
            int(draft.timestamps_ns[i]),
            draft.topics[at[i]].decode(),
        )
        for i in range(count)
    ]


def pending(sizes: list[int], topics: list[str]) -> PendingBatch:
    batch = PendingBatch(7)
    for number, (size, topic) in enumerate(zip(sizes, topics, strict=False)):
        if batch.has_room(topic, size + MESSAGE_COST_BYTES, BATCH_BYTES):
            index = batch.add_topic(topic)
            batch.add_many([bytes([number]) * size], [number], index, size + MESSAGE_COST_BYTES)
    return batch


@given(SIZES, st.lists(TOPICS, min_size=12, max_size=12), st.lists(st.integers(0, 6000), max_size=30), TOPICS)
def test_cut_values_follow_pending_messages_in_order_and_fill_their_batch(
    held: list[int], topics: list[str], sizes: list[int], topic: str
) -> None:
    batch = pending(held, topics)
    values = [bytes([100 + number]) * size for number, size in enumerate(sizes)]
    many = BulkMessages(values, topic, np.arange(1000, 1000 + len(values), dtype=np.int64))
    before, held_bytes = messages(batch.draft()) if batch.values else [], batch.bytes
    done, drafts, after = 0, list[BatchDraft](), batch
    while found := many.cut(done, after=after, batch_bytes=BATCH_BYTES, together_bytes=8192):
        drafts += found
        done, after = sum(map(len, map(messages, drafts))) - len(before), PendingBatch(0)
    wanted = before + [(value, 1000 + number, topic) for number, value in enumerate(values)]
    assert [message for draft in drafts for message in messages(draft)] == wanted[: len(before) + done]
    assert not (after is batch and batch.values)
    for draft in drafts:
        cost_bytes = sum(len(value) + MESSAGE_COST_BYTES for value, _, _ in messages(draft))
        assert draft.message_count == 1 or cost_bytes <= BATCH_BYTES + rest_bytes(BATCH_BYTES)
    if done < len(values):
        assert many.cost(done) <= BATCH_BYTES
    if before:
        joined = len(messages(drafts[0])) - len(before)
        cost = 0 if topic in batch.topics else len(topic) + TOPIC_COST_BYTES
        room = BATCH_BYTES - held_bytes - cost
        is_whole = joined == len(values) and many.cost(0) <= room + rest_bytes(BATCH_BYTES)
        assert joined == 0 or is_whole or many.cost(0) - many.cost(joined) <= room
        assert joined == len(values) or many.cost(0) - many.cost(joined + 1) > room


def cut(sizes: list[int], *, after: PendingBatch, batch_bytes: int) -> list[int]:
    """Return the number of messages in each batch. The remaining messages are not cut."""
    many = BulkMessages([bytes(size) for size in sizes], "", np.zeros(len(sizes), np.int64))
    return [
        draft.message_count
        for draft in many.cut(0, after=after, batch_bytes=batch_bytes, together_bytes=2**30)
    ]


def test_values_of_n_batch_sizes_are_cut_into_n_batches() -> None:
    sizes = [1024] * 256
    assert cut(sizes, after=PendingBatch(0), batch_bytes=2**18) == [256]
    few = PendingBatch(0)
    few.add_many([bytes(10)], [0], few.add_topic(""), 10 + MESSAGE_COST_BYTES)
    assert cut(sizes, after=few, batch_bytes=2**18) == [257]
    assert cut(sizes * 3, after=PendingBatch(0), batch_bytes=2**18) == [251, 251, 266]


def test_rest_too_large_for_last_batch_is_left_uncut() -> None:
    assert cut([1024] * 270, after=PendingBatch(0), batch_bytes=2**18) == [251]


def test_cut_batch_stays_below_maximum_batch_size() -> None:
    assert rest_bytes(BATCH_BYTES_MAX) == 0
    size = 2**16 - MESSAGE_COST_BYTES
    count, *_ = cut([size] * 257, after=PendingBatch(0), batch_bytes=BATCH_BYTES_MAX)
    assert count * 2**16 < BATCH_BYTES_MAX


def test_batch_accepts_maximum_header_sets_including_empty_one() -> None:
    batch = PendingBatch(0)
    batch.add_many([b"plain"], [0], batch.add_topic(""), 5 + MESSAGE_COST_BYTES)
    size = MESSAGE_COST_BYTES
    for number in range(SETS_MAX + 1):
        headers = (("k", b"%d" % number),)
        if not batch.has_room("", size, 2**24, headers):
            break
        batch.add_many([b""], [number], batch.add_topic("") | batch.add_headers(headers), size)
    draft = batch.draft()
    assert len(batch.values) == SETS_MAX
    table, index = read_headers(memoryview(draft.headers), len(batch.values))
    assert index is not None
    assert [table.sets[one] for one in index.tolist()[:2]] == [(), (("k", b"0"),)]
