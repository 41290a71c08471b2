"""Requests and answers between `rt pushes` and push processes, and how their sockets are found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rt.sidecar.push_control import (
    ListRequested,
    PushesListed,
    PushSummary,
    StopAnswered,
    StopRequested,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    listed_sockets,
    socket_name,
)

texts = st.text(max_size=10)
summaries = st.builds(
    PushSummary, texts, texts, st.lists(texts, max_size=3).map(tuple), st.none() | st.floats(0, 2**40)
)
requests = st.one_of(st.just(ListRequested()), st.builds(StopRequested, texts))
answers = st.one_of(
    st.lists(summaries, max_size=3).map(lambda pushes: PushesListed(tuple(pushes))),
    st.builds(StopAnswered, st.none() | texts),
)


@given(requests, answers)
def test_request_and_answer_round_trip_as_one_line(
    request: ListRequested | StopRequested, answer: PushesListed | StopAnswered
) -> None:
    for line in (encode_request(request), encode_answer(answer)):
        assert line.index(b"\n") == len(line) - 1
    assert decode_request(encode_request(request)) == request
    assert decode_answer(encode_answer(answer)) == answer


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{", b"[1]", b"{}", b'{"stop": 1}', b'{"list": false}', b"[" * 100_000, b"\xff"]
)
def test_malformed_request_or_answer_line_decodes_to_none(line: bytes) -> None:
    assert decode_request(line) is None
    assert decode_answer(line) is None


def test_socket_list_includes_only_listening_sockets_of_push_processes() -> None:
    name = socket_name(uid=7, pid=12)
    table = "\n".join(
        [
            "Num       RefCount Protocol Flags    Type St Inode Path",
            f"0000000000000000: 00000002 00000000 00010000 0001 01 1 @{name[1:]}",
            f"0000000000000000: 00000003 00000000 00000000 0001 03 2 @{name[1:]}",
            "0000000000000000: 00000002 00000000 00010000 0001 01 3 @rt-push/x/y/z",
            "0000000000000000: 00000002 00000000 00010000 0001 01 4 /tmp/@rt-push/1/2/3",
            "0000000000000000: 00000003 00000000 00000000 0001 03 5",
        ]
    )
    assert list(listed_sockets(table)) == [(7, 12, name)]
