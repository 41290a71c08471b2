"""Requests to a lease's owner: stored in its table, answered once, bounded and forgotten in time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequencer_core import must, new_state

from sequencer.state.apply import apply
from sequencer.state.apply_result import PostAnswer, RequestPosted, TableAnswer, TableWritten
from sequencer.state.leases import requests, tables
from sequencer.state.leases.leases import AcquireLeases, ExpireLeases, IdleLease
from sequencer.state.leases.requests import (
    CONTENT_BYTES_MAX,
    KEPT_NS,
    TIME_NS_MAX,
    Posted,
    PostRequest,
    look_up,
    waiting,
)
from sequencer.state.leases.table_rows import PagedRows, TableRow
from sequencer.state.leases.tables import TablePartId, WriteTable
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import decode_state, encode_state

LEASE = "g/queue/q1"
NUMBERS = itertools.count(1)
WAITING, ANSWERED, UNKNOWN, NO_TABLE, NO_ROOM = PostAnswer
S = 10**9


def request_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def post(state: SequencerState, number: int, at_s: int = 100, until_s: int = 130, **more: Any) -> PostAnswer:
    content = more.get("content", b"%d" % number)
    command = PostRequest(LEASE, request_id(number), at_s * S, until_s * S, content)
    posted = must(RequestPosted, apply(state, command))
    assert posted.id == request_id(number)
    return posted.answer


class Owner:
    def __init__(self, state: SequencerState) -> None:
        self.state = state
        held = state.leases.get(LEASE)
        if held is not None:
            apply(state, ExpireLeases((IdleLease(LEASE, held.token, held.renewals),)))
        apply(state, AcquireLeases(request_id(next(NUMBERS) + 10**6), "h1", 60_000, (LEASE,)))
        self.token = state.leases[LEASE].token

    def commit(self, *puts: tuple[str, bytes], answers: tuple[Posted, ...] = ()) -> TableAnswer:
        table = self.state.tables.get(LEASE)
        commits = 0 if table is None else table.commits
        attempt = next(NUMBERS).to_bytes(8, "big") + bytes(8)
        by = TablePartId(LEASE, "h1", self.token, commits + 1, attempt, 0, is_last=True)
        deletes = tuple(f"requests\0{one.id.hex()}" for one in answers)
        rows = [TableRow(*row) for row in puts]
        for one in answers:
            value = bytes(8) + one.until_ns.to_bytes(8, "big") + b"done " + one.content
            rows.append(TableRow(f"answers\0{one.id.hex()}", value))
        return must(TableWritten, apply(self.state, WriteTable(by, (), deletes, tuple(rows)))).answer


def owned() -> tuple[SequencerState, Owner]:
    state = new_state()
    owner = Owner(state)
    assert owner.commit(("low", b"1")) is TableAnswer.WRITTEN
    return state, owner


def asked(state: SequencerState) -> list[Posted]:
    table = state.tables.get(LEASE)
    assert table is not None
    return waiting(table)


def found(state: SequencerState, number: int) -> tuple[PostAnswer, bytes]:
    table = state.tables.get(LEASE)
    assert table is not None
    return look_up(table, request_id(number))


def test_request_waits_for_current_or_next_owner_and_is_answered_once() -> None:
    state, _ = owned()
    assert found(state, 1) == (UNKNOWN, b"")
    assert [post(state, 2, 101), post(state, 1, 100), post(state, 1, 105)] == [WAITING] * 3
    assert [one.content for one in asked(state)] == [b"1", b"2"], "the oldest first"
    before = encode_state(state)
    state = decode_state(before)
    assert encode_state(state) == before
    later = Owner(state)
    first, _ = asked(state)
    assert (first.at_ns, first.until_ns) == (100 * S, 130 * S)
    assert later.commit(("place", b"2"), answers=(first,)) is TableAnswer.WRITTEN
    assert [one.content for one in asked(state)] == [b"2"]
    assert found(state, 1) == (ANSWERED, b"done 1")
    assert post(state, 1, 110) is ANSWERED, "a repeated request is not asked again"
    assert [one.content for one in asked(state)] == [b"2"]


def test_replaced_owner_cannot_answer_requests() -> None:
    state, old = owned()
    post(state, 1)
    Owner(state)
    (one,) = asked(state)
    assert old.commit(answers=(one,)) is TableAnswer.NOT_OWNER
    assert asked(state) == [one]


def test_request_without_table_is_rejected_and_not_stored() -> None:
    state = new_state()
    before = encode_state(state)
    assert post(state, 1) is NO_TABLE
    assert encode_state(state) == before


def test_request_over_limit_is_rejected_until_expired_request_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "POSTED_MAX", 3)
    state, owner = owned()
    assert [post(state, number, until_s=100 + 10 * number) for number in (1, 2, 3)] == [WAITING] * 3
    owner.commit(answers=(asked(state)[1],))
    kept_s = KEPT_NS // S
    assert post(state, 4, at_s=110 + kept_s, until_s=999) is NO_ROOM
    assert post(state, 1, at_s=110 + kept_s, until_s=999) is WAITING, "it is known"
    assert post(state, 4, at_s=121 + kept_s, until_s=999) is WAITING
    assert [found(state, number)[0] for number in (1, 2, 3, 4)] == [UNKNOWN, UNKNOWN, WAITING, WAITING]
    table = state.tables.get(LEASE)
    assert table is not None
    assert state.tables.size_bytes == table.size_bytes
    assert state.tables.bytes_of == {"g": table.size_bytes}


def test_clock_jump_drops_expired_requests_only_above_kept_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, owner = owned()
    assert [post(state, 1), post(state, 2)] == [WAITING] * 2
    owner.commit(answers=(asked(state)[0],))
    assert post(state, 3, at_s=7200, until_s=7230) is WAITING
    assert [found(state, number)[0] for number in (1, 2, 3)] == [ANSWERED, WAITING, WAITING]
    monkeypatch.setattr(requests, "POSTED_KEPT", 3)
    assert post(state, 4, at_s=7200, until_s=7230) is WAITING
    assert [found(state, number)[0] for number in (1, 2, 3, 4)] == [UNKNOWN, UNKNOWN, WAITING, WAITING]


def test_requests_posted_by_clock_far_ahead_make_room_for_later_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "POSTED_MAX", 2)
    state, _ = owned()
    year_s = 365 * 86400
    assert [post(state, number, at_s=year_s, until_s=year_s + 30) for number in (1, 2)] == [WAITING] * 2
    assert post(state, 3) is WAITING
    assert [found(state, number)[0] for number in (1, 2, 3)] == [UNKNOWN, UNKNOWN, WAITING]


def test_request_over_bytes_limit_is_rejected_and_waiting_ones_can_be_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, owner = owned()
    monkeypatch.setattr(requests, "POSTED_BYTES_MAX", 3 * CONTENT_BYTES_MAX)
    large = bytes(CONTENT_BYTES_MAX)
    answers = [post(state, number, content=large) for number in (1, 2, 3)]
    assert answers == [WAITING, WAITING, NO_ROOM]
    assert owner.commit(answers=tuple(asked(state))) is TableAnswer.WRITTEN


@pytest.mark.parametrize("kind", ["GROUP_BYTES_MAX", "TABLES_BYTES_MAX"])
def test_full_tables_accept_requests_and_answers_so_owner_can_make_room(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, owner = owned()
    assert owner.commit(("place", bytes(1000))) is TableAnswer.WRITTEN
    monkeypatch.setattr(tables, "GROUPS_MAX", 1)
    monkeypatch.setattr(tables, "GROUP_BYTES_RESERVED", 0)
    monkeypatch.setattr(tables, kind, state.tables.size_bytes)
    assert owner.commit(("more", b"")) is TableAnswer.NO_ROOM
    assert [post(state, 1), post(state, 2, content=bytes(CONTENT_BYTES_MAX))] == [WAITING] * 2
    first, second = asked(state)
    assert owner.commit(("more", bytes(200)), answers=(second,)) is TableAnswer.NO_ROOM, "it adds something"
    answer = bytes(CONTENT_BYTES_MAX)
    assert owner.commit(answers=(second._replace(content=answer),)) is TableAnswer.WRITTEN
    assert owner.commit(("low", b"2"), answers=(first,)) is TableAnswer.WRITTEN, "positions move on"
    assert found(state, 1) == (ANSWERED, b"done 1")
    monkeypatch.setattr(tables, "SPARE_BYTES", state.tables.size_bytes - getattr(tables, kind))
    assert post(state, 3) is NO_ROOM, "there is a limit"
    table = state.tables.get(LEASE)
    assert table is not None
    by = TablePartId(
        LEASE, "h1", owner.token, table.commits + 1, (1 << 40).to_bytes(8, "big") + bytes(8), 0, True
    )
    write = WriteTable(by, (), ("place",), (TableRow("other", bytes(900)),))
    assert must(TableWritten, apply(state, write)).answer is TableAnswer.WRITTEN, "less than it deletes"


def test_request_rows_written_by_owner_itself_count_as_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    state, owner = owned()
    owner.commit(("requests\0zz", b"x"), ("requests\0" + "ab" * 16, b""), ("answers\0zz", b""))
    assert [one.until_ns for one in asked(state)] == [0]
    monkeypatch.setattr(requests, "POSTED_KEPT", 1)
    assert post(state, 1, at_s=1000, until_s=1001) is WAITING
    assert [one.content for one in asked(state)] == [b"1"], "what has no time is over"


@pytest.mark.parametrize(
    "change",
    [
        {"lease": "no-group"},
        {"id": b"short"},
        {"at_ns": 0},
        {"until_ns": 10},
        {"until_ns": 11 + TIME_NS_MAX},
        {"content": b""},
        {"content": bytes(CONTENT_BYTES_MAX + 1)},
    ],
)
def test_post_request_with_invalid_field_raises_value_error(change: dict[str, Any]) -> None:
    given_ = {"lease": LEASE, "id": bytes(16), "at_ns": 10, "until_ns": 20, "content": b"x"}
    PostRequest(**given_)
    with pytest.raises(ValueError):
        PostRequest(**{**given_, **change})


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.integers(0, 5)),
        st.tuples(st.just("repeat"), st.integers(0, 40)),
        st.tuples(st.just("work"), st.integers(1, 4)),
        st.tuples(st.just("late"), st.integers(0, 40)),
        st.tuples(st.just("move"), st.none()),
        st.tuples(st.just("restore"), st.none()),
        st.tuples(st.just("wait"), st.integers(1, 100)),
    ),
    max_size=40,
)


@given(ACTIONS)
@settings(max_examples=300)
def test_request_is_carried_out_at_most_once_with_repeated_or_late_commands(actions: list[Any]) -> None:
    """Each owner adds each request that it carries out to a counter row. Old commands are repeated in any
    order.
    """
    state, owner = owned()
    clock_s, sent, done = 1000, list[Any](), dict[bytes, int]()
    for what, number in actions:
        if what == "post":
            command = PostRequest(LEASE, request_id(number), clock_s * S, (clock_s + 30) * S, b"%d" % number)
            if all(not isinstance(one, PostRequest) or one.id != command.id for one in sent):
                sent.append(command)
                assert must(RequestPosted, apply(state, command)).answer is WAITING
        elif what in ("repeat", "late") and sent:
            apply(state, sent[number % len(sent)])
        elif what == "work":
            now_ns = clock_s * S
            todo = tuple(one for one in asked(state)[:number] if one.until_ns > now_ns)
            if owner.commit(answers=todo) is TableAnswer.WRITTEN:
                for one in todo:
                    done[one.id] = done.get(one.id, 0) + 1
        elif what == "move":
            owner = Owner(state)
        elif what == "restore":
            data = encode_state(state)
            state = decode_state(data)
            assert encode_state(state) == data
            owner.state = state
        elif what == "wait":
            clock_s += number
        table = state.tables.get(LEASE)
        assert table is not None
        rows = dict(table.rows)
        mailbox = {key: value for key, value in rows.items() if key.startswith(("requests\0", "answers\0"))}
        assert table.rows.mailbox == mailbox
        assert state.tables.size_bytes == table.size_bytes == PagedRows(rows.items()).size_bytes
    assert all(count == 1 for count in done.values())
