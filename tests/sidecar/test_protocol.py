"""Lines between a client and its push and pull processes, their settings and their position files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rt
from rt.client.cursor import ACKNOWLEDGED, TRIMMABLE, read_position, write_position
from rt.events import SkipForward
from rt.line_protocol import LINE_BYTES_MAX, LineBuffer, decode_line, encode_line
from rt.log.disk import REAL
from rt.log.format.checksum import sealed
from rt.sidecar.protocol import (
    EndpointStatus,
    ErrorReported,
    FinishRequested,
    HoldDenied,
    NodeReached,
    NodesUnreached,
    NoGoodBytes,
    PullReport,
    PushEnded,
    PushLine,
    PushReported,
    PushRequested,
)
from rt.sidecar.pull_process import lasting
from rt.sidecar.pull_settings import PullSettings

KINDS = [
    kind
    for kind in vars(rt.errors).values()
    if isinstance(kind, type) and issubclass(kind, rt.RtError) and kind not in {rt.Corrupt, rt.Gap}
]

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


@given(
    st.sampled_from(KINDS), st.text(), st.none() | st.text(), st.none() | st.integers(), st.none() | st.text()
)
def test_error_report_round_trips_with_type_and_text(
    kind: type[rt.RtError], what: str, where: str | None, got: int | None, hint: str | None
) -> None:
    error = kind(what, where=where, got=got, hint=hint)
    line = encode_line(ErrorReported.of(error))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    report = decode_line(line, PullReport)
    assert isinstance(report, ErrorReported)
    assert type(report.error) is kind
    assert str(report.error) == str(error)


def test_corrupt_error_keeps_path_and_offset_and_gap_becomes_rt_error() -> None:
    damaged = decode_line(
        encode_line(ErrorReported.of(rt.Corrupt("bad", path="/a/log.0.0", offset=7))), PullReport
    )
    assert isinstance(damaged, ErrorReported)
    assert isinstance(damaged.error, rt.Corrupt)
    assert (damaged.error.path, damaged.error.offset) == ("/a/log.0.0", 7)
    assert str(damaged.error) == "bad (at /a/log.0.0, offset 7)"
    gap = decode_line(
        encode_line(ErrorReported.of(rt.Gap("gone", event=SkipForward(0, 1, "time")))), PullReport
    )
    assert isinstance(gap, ErrorReported)
    assert type(gap.error) is rt.RtError
    for report in (NodeReached(12), NodesUnreached("n1:1: no such host"), HoldDenied("sub", 'a "why"\n')):
        assert decode_line(encode_line(report), PullReport) == report


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        *(
            json.dumps(said).encode()
            for said in (
                1,
                [],
                {},
                {"type": "reached", "end": -1},
                {"type": "reached", "end": "1"},
                {"type": "failed"},
                {"type": "refused", "name": "a"},
                {"type": "failed", "kind": "RtError", "texts": {"what": 1}},
                {"type": "corrupt", "start": 1, "end": "2", "why": ""},
            )
        ),
    ],
)
def test_malformed_pull_report_line_decodes_to_none(said: bytes) -> None:
    assert decode_line(said, PullReport) is None


@given(st.sampled_from(["Event", "SkipForward", "__name__", "TYPE_CHECKING", "Damaged", "int", ""]))
def test_error_report_of_unknown_kind_decodes_to_rt_error(name: str) -> None:
    report = decode_line(
        json.dumps({"type": "failed", "kind": name, "texts": {"what": "w"}}).encode(), PullReport
    )
    assert isinstance(report, ErrorReported)
    assert type(report.error) is rt.RtError


def test_failure_is_lasting_unless_restart_may_fix_it() -> None:
    for again in (rt.DirectoryLocked("held"), rt.DiskFull("full"), None):
        for status in (1, -9, 143):
            assert lasting(status, again) is None
    refused = rt.CertificateError("refused")
    assert lasting(1, refused) is refused
    misuse = lasting(2, None, "Error: no such option")
    assert misuse is not None
    assert "no such option" in str(misuse)


class FakeTLS:
    ca, cert, key = "ca.crt", "client.crt", "client.key"


@pytest.mark.parametrize(
    "wrong",
    [{"endpoints": ()}, {"retention": "never"}, {"topics": ("a\0b",)}, {"endpoints": ("n\0:1",)}],
)
def test_invalid_pull_settings_raise_value_error(wrong: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"stream": "s", "endpoints": ("n1:1",), "tls": FakeTLS()}
    with pytest.raises(ValueError):
        PullSettings(**(settings | wrong))


def test_pull_command_joins_option_values_with_equals_sign() -> None:
    settings = PullSettings("s", ("n1:1", "n2:1"), FakeTLS(), 7, ("--ca", ""), "own", "sub")  # type: ignore[arg-type]
    command = settings.command("/copy")
    assert command[1:6] == ["-m", "rt", "pull", "/copy", "--attached"]
    assert {"--topic=--ca", "--topic=", "--position=7", "--retention=own", "--name=sub"} <= set(command)
    assert "--endpoints=n1:1,n2:1" in command


def test_stored_position_is_valid_or_rejected(tmp_path: Path) -> None:
    path = str(tmp_path / "position")
    assert read_position(REAL, path, TRIMMABLE) is None
    for epoch in (None, 0, 2**24 - 1):
        write_position(REAL, path, TRIMMABLE, 2**63, epoch)
        assert read_position(REAL, path, TRIMMABLE) == (2**63, epoch)
    with pytest.raises(rt.Corrupt):
        read_position(REAL, path, ACKNOWLEDGED)
    whole = Path(path).read_bytes()
    for size in range(len(whole)):
        Path(path).write_bytes(whole[:size])
        with pytest.raises(rt.Corrupt, match="explicit position"):
            read_position(REAL, path, TRIMMABLE)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        Path(path).write_bytes(flipped)
        with pytest.raises(rt.Corrupt):
            read_position(REAL, path, TRIMMABLE)


def test_stored_position_of_newer_version_is_rejected_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "position"
    write_position(REAL, str(path), TRIMMABLE, 7)
    path.write_bytes(newer := sealed(path.read_bytes()[:8] + b"\x02" + path.read_bytes()[9:]))
    with pytest.raises(rt.UnknownVersion, match="got 2, expected 1"):
        read_position(REAL, str(path), TRIMMABLE)
    assert path.read_bytes() == newer


@pytest.mark.parametrize("end", [None, 90])
def test_report_of_no_good_bytes_round_trips_and_negative_start_decodes_to_none(end: int | None) -> None:
    report = NoGoodBytes(7, end, "n1: damaged")
    assert decode_line(encode_line(report), PullReport) == report
    assert decode_line(b'{"type": "corrupt", "start": -1, "end": null, "why": ""}', PullReport) is None


@given(reports)
def test_push_report_round_trips_with_types_and_texts_of_its_errors(report: PushReported) -> None:
    arrived = decode_line(encode_line(report), PushLine)
    assert arrived == report
    assert (type(arrived.error), str(arrived.error)) == (type(report.error), str(report.error))
    assert list(map(str, arrived.endpoints)) == list(map(str, report.endpoints))


@settings(max_examples=20)
@given(st.lists(lines_said, max_size=5), st.integers(1, 20))
def test_push_lines_arrive_whole_however_the_stream_is_split(said: list[PushLine], size: int) -> None:
    data = b"".join(map(encode_line, said))
    lines = LineBuffer()
    got = [line for at in range(0, len(data), size) for line in lines.take(data[at : at + size])]
    assert [decode_line(line, PushLine) for line in got] == said


def test_non_unicode_path_round_trips_in_push_request() -> None:
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
def test_malformed_push_line_decodes_to_none(line: bytes) -> None:
    assert decode_line(line, PushLine) is None


def test_unterminated_line_is_buffered_up_to_line_bytes_max() -> None:
    lines = LineBuffer()
    for _ in range(3):
        assert lines.take(bytes(LINE_BYTES_MAX // 2 + 1)) == []
    (line,) = lines.take(b"\n")
    assert len(line) == LINE_BYTES_MAX
