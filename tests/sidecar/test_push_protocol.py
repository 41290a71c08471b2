"""What a process with publishers and its push processes tell each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rt
from rt.line_protocol import LINE_BYTES_MAX, LineBuffer, decode_line, encode_line
from rt.sidecar.push_protocol import (
    EndpointStatus,
    FinishRequested,
    PushEnded,
    PushLine,
    PushReported,
    PushRequested,
)

texts = st.text(max_size=8)
lines_said = st.one_of(
    st.builds(
        PushRequested,
        st.integers(0),
        texts,
        texts,
        st.lists(texts, max_size=3).map(tuple),
        texts,
        texts,
        texts,
    ),
    st.builds(FinishRequested, st.integers(0)),
    st.builds(PushEnded, st.integers(0)),
)
errors = st.none() | st.builds(
    lambda kind, what, hint: kind(what, hint=hint),
    st.sampled_from([rt.CertificateError, rt.Fenced, rt.RtError]),
    texts,
    st.none() | texts,
)
reports = st.builds(
    PushReported.of,
    st.integers(0),
    errors,
    st.lists(st.builds(EndpointStatus, texts, st.booleans(), errors), max_size=3),
)


@given(reports)
def test_a_report_arrives_with_the_types_and_texts_of_its_errors(report: PushReported) -> None:
    arrived = decode_line(encode_line(report), PushLine)
    assert arrived == report
    assert (type(arrived.error), str(arrived.error)) == (type(report.error), str(report.error))
    assert list(map(str, arrived.endpoints)) == list(map(str, report.endpoints))


@settings(max_examples=20)
@given(st.lists(lines_said, max_size=5), st.integers(1, 20))
def test_what_is_said_arrives_however_it_is_cut(said: list[PushLine], size: int) -> None:
    data = b"".join(map(encode_line, said))
    lines = LineBuffer()
    got = [line for at in range(0, len(data), size) for line in lines.take(data[at : at + size])]
    assert [decode_line(line, PushLine) for line in got] == said


def test_a_path_that_is_no_unicode_arrives() -> None:
    said = PushRequested(1, "/\udcff", "s", ("a:1",), "ca", "cert", "key")
    assert decode_line(encode_line(said), PushLine) == said


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"type": "finish", "number": "1"}',
        b'{"type": "push", "number": 1}',
        b'{"type": "log"}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_line_that_says_nothing_known_is_none(line: bytes) -> None:
    assert decode_line(line, PushLine) is None


def test_what_never_ends_uses_bounded_memory() -> None:
    lines = LineBuffer()
    for _ in range(3):
        assert lines.take(bytes(LINE_BYTES_MAX // 2 + 1)) == []
    (line,) = lines.take(b"\n")
    assert len(line) == LINE_BYTES_MAX
