"""Tables of leases: changes by the lease's owner only, in whole ordered commits, within limits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequencer_core import must, new_state, refusal

from sequencer.state.apply import apply
from sequencer.state.apply_result import TableAnswer, TableDeleted, TableWritten
from sequencer.state.leases import tables
from sequencer.state.leases.leases import AcquireLeases, ExpireLeases, HeldLease, IdleLease, ReleaseLeases
from sequencer.state.leases.table_rows import PAGES, ROW_BYTES, LeaseTable, PagedRows, TableRow
from sequencer.state.leases.tables import DeleteTable, TablePartId, WriteTable
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import decode_state, encode_state

NUMBERS = itertools.count(1)
LEASE = "g/queue/q1"
WRITTEN, NOT_OWNER, OUT_OF_ORDER, NO_ROOM = TableAnswer


def fresh() -> bytes:
    return next(NUMBERS).to_bytes(8, "big") + bytes(8)


def grant(state: SequencerState, owner: str = "h1", lease: str = LEASE) -> int:
    """Grant the lease to `owner`, even if another owner holds it. Return the token."""
    held = state.leases.get(lease)
    if held is not None:
        apply(state, ExpireLeases((IdleLease(lease, held.token, held.renewals),)))
    apply(state, AcquireLeases(fresh(), owner, 60_000, (lease,)))
    return state.leases[lease].token


def part(
    token: int,
    commit: int,
    *puts: tuple[str, bytes],
    request: bytes | None = None,
    at: int = 0,
    is_last: bool = True,
    owner: str = "h1",
    lease: str = LEASE,
    **more: Any,
) -> WriteTable:
    by = TablePartId(lease, owner, token, commit, request or fresh(), at, is_last)
    return WriteTable(by, puts=tuple(TableRow(*row) for row in puts), **more)


def do(state: SequencerState, command: WriteTable) -> tuple[TableAnswer, int]:
    written = must(TableWritten, apply(state, command))
    assert written.id == (command.by.request, command.by.part)
    return written.answer, written.commits


def rows(state: SequencerState, lease: str = LEASE) -> dict[str, bytes]:
    table = state.tables.get(lease)
    return {} if table is None else dict(table.rows)


def test_commit_deletes_prefixes_and_rows_and_writes_rows() -> None:
    state = new_state()
    token = grant(state)
    assert do(state, part(token, 1, ("a1", b"1"), ("a2", b"2"), ("b", b"3"), ("c", b"4"))) == (WRITTEN, 1)
    change = part(token, 2, ("a2", b"new"), ("d", b""), clears=("a",), deletes=("b", "unknown"))
    assert do(state, change) == (WRITTEN, 2)
    assert rows(state) == {"a2": b"new", "c": b"4", "d": b""}
    assert do(state, part(token, 3, clears=("",))) == (WRITTEN, 3)
    assert rows(state) == {}


def test_next_owner_keeps_rows_and_earlier_owner_is_rejected() -> None:
    state = new_state()
    old = grant(state)
    do(state, part(old, 1, ("a", b"1")))
    new = grant(state, "h2")
    late = part(old, 2, ("a", b"late"))
    before = encode_state(state)
    assert do(state, late) == (NOT_OWNER, 1)
    assert do(state, part(new, 2, ("a", b"x"))) == (NOT_OWNER, 1), "the token of another owner"
    assert encode_state(state) == before
    assert do(state, part(new, 2, ("b", b"2"), owner="h2")) == (WRITTEN, 2)
    assert rows(state) == {"a": b"1", "b": b"2"}


def test_write_after_release_of_lease_is_rejected() -> None:
    state = new_state()
    token = grant(state)
    apply(state, ReleaseLeases(fresh(), "h1", (HeldLease(LEASE, token),)))
    assert do(state, part(token, 1, ("a", b"1"))) == (NOT_OWNER, 0)
    assert not state.tables.by_lease


def test_parts_of_commit_take_effect_together_with_last_part() -> None:
    state = new_state()
    token, request = grant(state), fresh()
    first = part(token, 1, ("a", b"1"), request=request, is_last=False)
    last = part(token, 1, ("b", b"2"), request=request, at=1, deletes=("a",))
    assert do(state, first) == (WRITTEN, 0)
    assert rows(state) == {}
    restored = decode_state(encode_state(state))
    assert restored == state
    for each in (state, restored):
        assert do(each, first) == (WRITTEN, 0), "repeated"
        assert do(each, last) == (WRITTEN, 1)
        for repeated in (last, first):
            assert do(each, repeated) == (WRITTEN, 1)
        assert rows(each) == {"b": b"2"}
    assert encode_state(restored) == encode_state(state)


def test_new_attempt_replaces_staged_parts_of_earlier_attempt() -> None:
    state = new_state()
    token, first, second = grant(state), fresh(), fresh()
    do(state, part(token, 1, ("a", b"1"), request=first, is_last=False))
    assert do(state, part(token, 1, request=second, at=1)) == (OUT_OF_ORDER, 0), "its first part is missing"
    assert do(state, part(token, 1, ("b", b"1"), request=second, is_last=False)) == (WRITTEN, 0)
    assert do(state, part(token, 1, request=first, at=1)) == (NO_ROOM, 0), "an earlier attempt"
    assert do(state, part(token, 1, request=second, at=1)) == (WRITTEN, 1)
    assert rows(state) == {"b": b"1"}


def test_staged_parts_are_dropped_when_lease_is_granted_again() -> None:
    state = new_state()
    token, request = grant(state), fresh()
    do(state, part(token, 1, ("a", b"1"), request=request, is_last=False))
    assert state.tables.size_bytes
    new = grant(state)
    assert state.tables.size_bytes == 0
    assert do(state, part(new, 1, ("b", b"2"), request=request, at=1)) == (OUT_OF_ORDER, 0)
    assert do(state, part(token, 1, ("b", b"2"), request=request, at=1)) == (NOT_OWNER, 0)


@pytest.mark.parametrize("commit", [2, 4, 5])
def test_commit_without_next_number_is_rejected_as_out_of_order(commit: int) -> None:
    state = new_state()
    token = grant(state)
    for at in (1, 2):
        do(state, part(token, at, ("a", bytes([at]))))
    before = encode_state(state)
    assert do(state, part(token, commit, ("a", b"x"))) == (OUT_OF_ORDER, 2)
    assert encode_state(state) == before


def test_release_of_lease_removes_empty_table_and_keeps_table_with_rows() -> None:
    state = new_state()
    empty, full = grant(state, lease="g/empty"), grant(state, lease="g/full")
    do(state, part(empty, 1, deletes=("a",), lease="g/empty"))
    do(state, part(full, 1, ("a", b"1"), lease="g/full"))
    held = (HeldLease("g/empty", empty), HeldLease("g/full", full))
    apply(state, ReleaseLeases(fresh(), "h1", held))
    assert {*state.tables.by_lease} == {"g/full"}
    assert state.tables.count_of == {"g": 1}


def test_delete_table_is_refused_while_lease_is_held() -> None:
    state = new_state()
    assert "no table" in refusal(state, DeleteTable(LEASE)).why
    token = grant(state)
    do(state, part(token, 1, ("a", b"1")))
    assert "held by h1" in refusal(state, DeleteTable(LEASE)).why
    apply(state, ReleaseLeases(fresh(), "h1", (HeldLease(LEASE, token),)))
    assert must(TableDeleted, apply(state, DeleteTable(LEASE))).lease == LEASE
    assert not state.tables.by_lease
    assert not state.tables.bytes_of


def test_table_bytes_are_limited_per_group_and_in_total_and_deletion_frees_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "GROUP_BYTES_MAX", 1000)
    monkeypatch.setattr(tables, "TABLES_BYTES_MAX", 1500)
    monkeypatch.setattr(tables, "GROUP_BYTES_RESERVED", 0)
    state = new_state()
    token = grant(state)
    assert do(state, part(token, 1, ("a", bytes(650)))) == (WRITTEN, 1)
    before = rows(state)
    assert do(state, part(token, 2, ("b", bytes(300)))) == (NO_ROOM, 1)
    assert rows(state) == before
    other = grant(state, lease="h/x")
    assert do(state, part(other, 1, ("b", bytes(500)), lease="h/x")) == (WRITTEN, 1)
    third = grant(state, lease="i/x")
    assert do(state, part(third, 1, ("b", bytes(60)), lease="i/x")) == (NO_ROOM, 0), "all groups"
    assert do(state, part(token, 2, deletes=("a",))) == (WRITTEN, 2)
    assert do(state, part(third, 1, ("b", bytes(60)), lease="i/x")) == (WRITTEN, 1)


def test_staged_parts_count_toward_size_and_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PARTS_MAX", 3)
    state = new_state()
    token, request = grant(state), fresh()
    for at in range(3):
        step = part(token, 1, (f"k{at}", b"x"), request=request, at=at, is_last=False)
        assert do(state, step) == (WRITTEN, 0)
    assert state.tables.size_bytes == 3 * (2 + 1 + ROW_BYTES)
    monkeypatch.setattr(tables, "PARTS_MAX", 4)
    command = part(token, 1, ("k3", b"x"), request=request, at=3)
    monkeypatch.setattr(tables, "PARTS_MAX", 3)
    assert do(state, command) == (NO_ROOM, 0)


def test_tables_per_group_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "TABLES_PER_GROUP_MAX", 1)
    state = new_state()
    first, second = grant(state, lease="g/1"), grant(state, lease="g/2")
    assert do(state, part(first, 1, ("a", b"1"), lease="g/1")) == (WRITTEN, 1)
    assert do(state, part(second, 1, ("a", b"1"), lease="g/2")) == (NO_ROOM, 0)
    assert do(state, part(first, 2, ("a", b"2"), lease="g/1")) == (WRITTEN, 2)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(lambda: part(0, 1), id="token"),
        pytest.param(lambda: part(1, 0), id="number"),
        pytest.param(lambda: part(1, 1, request=b"short"), id="request"),
        pytest.param(lambda: part(1, 1, at=-1), id="part"),
        pytest.param(lambda: part(1, 1, at=tables.PARTS_MAX), id="part-max"),
        pytest.param(lambda: part(1, 1, ("", b"x")), id="empty-key"),
        pytest.param(lambda: part(1, 1, deletes=("",)), id="empty-deleted-key"),
        pytest.param(lambda: part(1, 1, ("k" * 1025, b"x")), id="long-key"),
        pytest.param(lambda: part(1, 1, ("k", bytes(tables.PART_BYTES_MAX))), id="large"),
        pytest.param(lambda: part(1, 1, lease="no-group"), id="lease"),
        pytest.param(lambda: part(1, 1, owner="two words"), id="owner"),
        pytest.param(lambda: DeleteTable("no-group"), id="deleted-lease"),
    ],
)
def test_malformed_table_command_raises_value_error(command: Any) -> None:
    with pytest.raises(ValueError):
        command()


KEYS = st.sampled_from(["a", "a1", "b", "b\0c", "ä"])
VALUES = st.binary(max_size=3)


@given(st.lists(st.tuples(st.sampled_from(["put", "delete", "clear"]), KEYS, VALUES), max_size=30))
def test_paged_rows_match_dictionary_after_any_changes(steps: list[tuple[str, str, bytes]]) -> None:
    paged, model = PagedRows(), dict[str, bytes]()
    for do_what, key, value in steps:
        if do_what == "put":
            paged.put(key, value)
            model[key] = value
        elif do_what == "delete":
            paged.delete(key)
            model.pop(key, None)
        else:
            paged.clear((key,))
            model = {one: kept for one, kept in model.items() if not one.startswith(key)}
        assert dict(paged) == model
        assert paged.count == len(model)
        assert paged.size_bytes == sum(
            len(one.encode()) + len(kept) + ROW_BYTES for one, kept in model.items()
        )
    assert paged == PagedRows(sorted(model.items(), reverse=True))
    assert dict(row for at in range(PAGES) for row in paged.page(at)) == model


def test_only_changed_pages_are_encoded_again() -> None:
    made = list[int]()

    def encode(found: list[tuple[str, bytes]]) -> bytes:
        made.append(len(found))
        return repr(found).encode()

    paged = PagedRows((f"key-{number}", b"value") for number in range(10_000))
    first = [page.content for page in paged.encoded(encode)]
    assert sum(made) == 10_000
    made.clear()
    paged.put("key-77", b"changed")
    second = [page.content for page in paged.encoded(encode)]
    assert len(made) == 1
    assert sum(one != other for one, other in zip(first, second, strict=True)) == 1


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("move"), st.sampled_from(["h1", "h2"])),
        st.tuples(
            st.just("commit"), st.lists(st.lists(st.tuples(KEYS, VALUES), max_size=2), min_size=1, max_size=3)
        ),
        st.tuples(st.just("replay"), st.integers(0, 30)),
        st.tuples(st.just("abandon"), st.lists(st.tuples(KEYS, VALUES), max_size=2)),
        st.tuples(st.just("restore"), st.none()),
    ),
    max_size=25,
)


@given(ACTIONS)
@settings(max_examples=300)
def test_each_commit_counts_once_despite_repeated_late_or_abandoned_commands(actions: list[Any]) -> None:
    """Only the owner's commits change the rows. Old commands, in any order, change nothing."""
    state, model, sent = new_state(), dict[str, bytes](), list[WriteTable]()
    owner, token, commits = "h1", grant(state), 0
    for what, given_ in actions:
        if what == "move":
            owner, token = given_, grant(state, given_)
            commits = (state.tables.get(LEASE) or LeaseTable()).commits
        elif what == "commit":
            request = fresh()
            for at, puts in enumerate(given_):
                is_last = at == len(given_) - 1
                step = part(token, commits + 1, *puts, request=request, at=at, is_last=is_last, owner=owner)
                sent.append(step)
                assert do(state, step)[0] is WRITTEN
            commits += 1
            model.update(row for puts in given_ for row in puts)
        elif what == "abandon":
            step = part(token, commits + 1, *given_, is_last=False, owner=owner)
            sent.append(step)
            assert do(state, step)[0] is WRITTEN
        elif what == "replay" and sent:
            apply(state, sent[given_ % len(sent)])
        elif what == "restore":
            data = encode_state(state)
            state = decode_state(data)
            assert encode_state(state) == data
        assert rows(state) == model
        table = state.tables.get(LEASE)
        assert state.tables.size_bytes == (0 if table is None else table.size_bytes)


def test_refused_commit_stays_refused_when_repeated_after_room_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "GROUP_BYTES_MAX", 1000)
    state = new_state()
    token, other = grant(state), grant(state, lease="g/queue/q2")
    full = part(other, 1, ("a", b"x" * 700), lease="g/queue/q2")
    assert do(state, full) == (WRITTEN, 1)
    refused = part(token, 1, ("a", b"x" * 700))
    for _ in range(2):
        assert do(state, refused) == (NO_ROOM, 0)
    assert do(state, part(other, 2, deletes=("a",), lease="g/queue/q2")) == (WRITTEN, 2)
    restored = decode_state(encode_state(state))
    assert restored == state
    for each in (state, restored):
        assert do(each, refused) == (NO_ROOM, 0), "its owner knows that it did not happen"
        again = part(token, 1, ("a", b"y"))
        assert do(each, again) == (WRITTEN, 1)
        assert do(each, refused) == (NO_ROOM, 1)
        assert rows(each) == {"a": b"y"}
    new = grant(state, "h2")
    assert do(state, part(new, 2, ("a", b"z"), owner="h2", request=bytes(16))) == (WRITTEN, 2)


def test_late_part_of_earlier_attempt_keeps_staged_parts_of_current_one() -> None:
    state = new_state()
    token, first, second = grant(state), fresh(), fresh()
    late = part(token, 1, ("a", b"1"), request=first, is_last=False)
    assert do(state, late) == (WRITTEN, 0)
    assert do(state, part(token, 1, ("b", b"2"), request=second, is_last=False)) == (WRITTEN, 0)
    before = encode_state(state)
    do(state, late)
    assert encode_state(state) == before
    assert do(state, part(token, 1, ("c", b"3"), request=second, at=1)) == (WRITTEN, 1)
    assert rows(state) == {"b": b"2", "c": b"3"}


def test_full_groups_leave_other_groups_their_reserved_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "TABLES_BYTES_MAX", 7000)
    monkeypatch.setattr(tables, "GROUPS_MAX", 4)
    monkeypatch.setattr(tables, "GROUP_BYTES_RESERVED", 1000)
    monkeypatch.setattr(tables, "GROUP_BYTES_MAX", 3000)
    state = new_state()
    leases = [f"{group}/x" for group in "abcde"]
    tokens = {lease: grant(state, lease=lease) for lease in leases}
    commits = dict.fromkeys(leases, 0)

    def put(lease: str, key: str, size: int) -> TableAnswer:
        answer, commits[lease] = do(
            state, part(tokens[lease], commits[lease] + 1, (key, bytes(size - ROW_BYTES - 1)), lease=lease)
        )
        return answer

    assert [put(lease, "k", 2500) for lease in leases[:2]] == [WRITTEN, WRITTEN]
    assert [put(leases[2], "k", size) for size in (1001, 1000)] == [NO_ROOM, WRITTEN]
    assert put(leases[3], "k", 1000) is WRITTEN
    assert put(leases[4], "k", 500) is NO_ROOM, "too many groups"
    assert put(leases[0], "l", 200) is NO_ROOM
    assert state.tables.size_bytes == 7000
