"""Limits on lease tables: clients cannot fill the memory of nodes or keep consensus busy."""

from __future__ import annotations

from typing import Any

import pytest
from sequencer_core import must, new_state

from rt.v1 import leases_pb2
from sequencer.state.apply import apply
from sequencer.state.apply_result import TableAnswer, TableWritten
from sequencer.state.leases import tables
from sequencer.state.leases.leases import AcquireLeases
from sequencer.state.leases.table_rows import ROW_BYTES, PagedRows, StagedPart, TableRow
from sequencer.state.leases.tables import TablePartId, WriteTable
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import decode_state, encode_state, frozen_state

LEASE = "g/queue/q1"
SECOND = (2).to_bytes(8, "big") + bytes(8)
WRITTEN, _, _, NO_ROOM = TableAnswer


def granted(*leases: str) -> SequencerState:
    state = new_state()
    apply(state, AcquireLeases(b"a" * 16, "h1", 60_000, leases or (LEASE,)))
    return state


def write(
    state: SequencerState,
    *puts: tuple[str, bytes],
    request: bytes | None = None,
    at: int = 0,
    commit: int = 1,
    is_last: bool = True,
    lease: str = LEASE,
    **more: Any,
) -> TableAnswer:
    """Write a part of a table. With `request` None it belongs to the attempt that is allowed now."""
    request = request or max(1, state.leases[lease].attempt).to_bytes(8, "big") + bytes(8)
    by = TablePartId(lease, "h1", state.leases[lease].token, commit, request, at, is_last)
    command = WriteTable(by, puts=tuple(TableRow(*row) for row in puts), **more)
    return must(TableWritten, apply(state, command)).answer


def test_staged_parts_with_only_deletes_count_towards_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "GROUP_BYTES_MAX", 1000)
    monkeypatch.setattr(tables, "SPARE_BYTES", 1000)
    leases = [f"g/{number}" for number in range(4)]
    state = granted(*leases)
    answers = {
        write(state, lease=lease, at=at, is_last=False, deletes=("k" * 100,))
        for lease in leases
        for at in range(8)
    }
    assert answers == {WRITTEN, NO_ROOM, TableAnswer.OUT_OF_ORDER}, "a refused attempt is over"
    assert state.tables.size_bytes <= 2000
    assert write(state, lease=leases[3], request=SECOND, deletes=("k",)) is WRITTEN, "a whole commit"


def test_full_table_accepts_replaced_rows_and_reuses_room_of_abandoned_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = granted()
    assert write(state, ("a", bytes(100)), ("b", bytes(100))) is WRITTEN
    monkeypatch.setattr(tables, "GROUP_BYTES_MAX", state.tables.size_bytes)
    assert write(state, ("a", b"1" * 100), ("a", b"2" * 100), commit=2, request=SECOND) is WRITTEN
    assert write(state, ("a", bytes(101)), commit=3) is NO_ROOM
    assert write(state, ("c", b""), commit=3) is NO_ROOM
    monkeypatch.setattr(tables, "GROUP_BYTES_MAX", state.tables.size_bytes + 2 * ROW_BYTES)
    assert write(state, ("c", b"1"), commit=3, is_last=False) is WRITTEN
    again = (9).to_bytes(8, "big") + bytes(8)
    assert write(state, ("c", b"1"), commit=3, request=again, is_last=False) is WRITTEN
    assert write(state, ("d", b"1"), commit=3, request=again, at=1) is NO_ROOM


def test_commit_clears_limited_number_of_prefixes_in_first_part_only() -> None:
    state = granted()
    prefixes = tuple(f"p{number}" for number in range(tables.CLEARS_MAX))
    assert write(state, clears=prefixes) is WRITTEN
    for at, clears in ((0, (*prefixes, "more")), (1, ("p",))):
        with pytest.raises(ValueError, match="prefixes in part"):
            write(state, at=at, clears=clears)


def test_clearing_several_prefixes_checks_each_row_once() -> None:
    class Key(str):
        looks = 0

        def startswith(self, *args: Any) -> bool:
            Key.looks += 1
            return super().startswith(*args)

    rows = PagedRows((Key(f"{number:03}"), b"") for number in range(300))
    Key.looks = 0
    rows.clear(("00", "01", "299"))
    assert Key.looks == 300
    assert rows.count == 279
    assert rows.size_bytes == 279 * (3 + ROW_BYTES)


def test_commit_with_too_many_keys_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COMMIT_KEYS_MAX", 3)
    state = granted()
    assert write(state, ("a", b""), is_last=False, deletes=("b",)) is WRITTEN
    assert write(state, ("c", b""), ("d", b""), at=1, is_last=False) is NO_ROOM
    assert write(state, ("a", b""), is_last=False, deletes=("b",)) is WRITTEN
    assert write(state, ("c", b""), at=1) is WRITTEN
    assert write(state, ("c", b""), commit=2, deletes=("e", "f", "g")) is NO_ROOM


def test_staging_100_parts_computes_part_sizes_at_most_400_times(monkeypatch: pytest.MonkeyPatch) -> None:
    state, counted = granted(), list[StagedPart]()
    size = StagedPart.size_bytes.fget  # type: ignore[attr-defined]

    def counting(part: StagedPart) -> int:
        counted.append(part)
        return int(size(part))

    monkeypatch.setattr(StagedPart, "size_bytes", property(counting))
    for at in range(100):
        assert write(state, (f"k{at}", b"x"), at=at, is_last=False) is WRITTEN
    assert len(counted) <= 400
    assert state.tables.size_bytes == sum(size(part) for part in state.tables.by_lease[LEASE].staged)


def test_unchanged_table_pages_are_not_encoded_again_after_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = granted()
    write(state, *((f"key-{number}", b"value") for number in range(300)))
    data = encode_state(state)
    restored = decode_state(data, keeps_pages=True)
    with monkeypatch.context() as patched:
        patched.setattr(leases_pb2, "TableRow", None)  # Encoding a row would need this class.
        assert encode_state(restored) == data
    for one in (state, restored):
        assert write(one, ("key-7", b"new"), commit=2) is WRITTEN
    assert encode_state(restored) == encode_state(state) != data


def test_table_pages_divided_differently_by_another_node_are_encoded_again() -> None:
    rows = [(f"key-{number}", b"value") for number in range(20)]
    two = PagedRows()
    two.adopt(rows, b"strange")
    assert "strange" not in str([page.content for page in two.encoded(lambda found: repr(found).encode())])


def test_snapshot_has_table_rows_of_its_creation_whenever_it_is_encoded() -> None:
    state = granted()
    write(state, *((f"key-{number}", b"value") for number in range(300)))
    before = encode_state(decode_state(encode_state(state)))
    write(state, ("key-7", b"new"), commit=2, request=SECOND)
    write(state, ("key-7", b"value"), commit=3)
    frozen = frozen_state(state)
    expected = encode_state(decode_state(encode_state(state)))
    write(state, ("key-7", b"later"), commit=4, deletes=("key-8",), request=SECOND)
    assert frozen() == frozen() == expected != before
    assert encode_state(state) == encode_state(decode_state(encode_state(state)))
