"""`rt pub` and `rt sub` round-trip messages in every format and reject invalid input and options."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import columns, forge
from click.testing import CliRunner, Result
from disks import FaultyDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from module_shadow import shadow
from pull_source import pull_source
from push_node import NodesInThread, PushNode
from receiving_node import make_pki, tls_of

import rt
from rt.cli.formats import parsers, publish_loop, writers
from rt.cli.main import cli
from rt.cli.signals import Interrupts
from rt.log.disk import REAL
from rt.log.format.checksum import batch_seed
from rt.log.format.headers import Headers
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.directory import is_log_directory, read_durable_end
from rt.log.write.writer import BatchFrames, LogWriter
from rt.testing.merged import MergedLogBuilder
from sequencer.localcluster.processes import nothing_left

DEADLINE_SECONDS = 120
DATA = Path("s/sessions/feed")


def run(*arguments: object, stdin: bytes | None = None, **environment: str) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], input=stdin, env=environment)


def run_well(*arguments: object, stdin: bytes | None = None, **environment: str) -> Result:
    result = run(*arguments, stdin=stdin, **environment)
    assert result.exit_code == 0, result.output
    return result


class Log:
    """A session below `root` that the command publishes to and reads back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / DATA

    def pub(self, *arguments: object, stdin: bytes | None = None) -> Result:
        return run("pub", "--path", self.root, "--stream", "s", "--name", "feed", *arguments, stdin=stdin)

    def pub_well(self, *arguments: object, stdin: bytes | None = None) -> Result:
        result = self.pub(*arguments, stdin=stdin)
        assert result.exit_code == 0, result.output
        return result

    def sub(self, *arguments: object) -> Result:
        return run("sub", self.directory, *arguments)

    def sub_well(self, *arguments: object) -> bytes:
        result = self.sub(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout_bytes

    def messages(self) -> list[tuple[str, bytes]]:
        with rt.LogReader(self.directory) as reader:
            return [(message.topic, message.value) for message in reader]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "root")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Log]:
    return lambda: Log(tmp_path_factory.mktemp("log") / "root")


# Lines


def test_lines_round_trip_byte_for_byte(log: Log) -> None:
    text = b"first\n\nthird \xff\x00\r\nwindows\r\n \n"
    log.pub_well("--topic", "t", stdin=text)
    assert log.sub_well() == text
    assert {topic for topic, _ in log.messages()} == {"t"}


@settings(max_examples=20)
@given(text=st.binary(max_size=200).map(lambda text: text.replace(b"a", b"\n") + b"\n"))
def test_random_lines_round_trip_byte_for_byte(fresh: Callable[[], Log], text: bytes) -> None:
    log = fresh()
    log.pub_well(stdin=text)
    assert log.sub_well() == text


def test_last_line_without_newline_is_published(log: Log) -> None:
    log.pub_well(stdin=b"a\nb")
    assert log.sub_well() == b"a\nb\n"


def test_empty_input_publishes_no_messages(log: Log) -> None:
    result = log.pub_well("--json", stdin=b"")
    assert json.loads(result.stdout)["messages"] == 0
    assert json.loads(result.stdout)["first"] is None
    assert log.sub_well() == b""


def test_lines_split_across_reads_stay_whole(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"".join(b"%d" % number * (number % 7) + b"\n" for number in range(300))
    for size in (1, 2, 3, 64):
        monkeypatch.setattr(parsers, "READ_BYTES", size)
        one = Log(log.root / str(size))
        one.pub_well(stdin=text)
        assert one.sub_well() == text


def test_input_files_and_stdin_are_published_in_argument_order(log: Log, tmp_path: Path) -> None:
    for name, text in (("one", b"1\n2"), ("two", b"3\n")):
        (tmp_path / name).write_bytes(text)
    log.pub_well(tmp_path / "one", "-", tmp_path / "two", stdin=b"stdin\n")
    assert log.sub_well() == b"1\n2\nstdin\n3\n"


def test_pub_fails_at_line_above_size_limit_and_keeps_earlier_lines(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsers, "MESSAGE_BYTES_MAX", 100)
    monkeypatch.setattr(parsers, "READ_BYTES", 16)
    (tmp_path / "in").write_bytes(b"good\nalso good\n" + b"x" * 101 + b"\nafter\n")
    result = log.pub(tmp_path / "in")
    assert result.exit_code == 1
    assert f"the line is too long for a message (at {tmp_path / 'in'}, line 3)" in result.stderr
    assert log.sub_well() == b"good\nalso good\n"


# Summary


def test_pub_summary_reports_published_messages_unless_quiet(log: Log) -> None:
    log.pub_well(stdin=b"a\n")
    result = log.pub_well("--json", stdin=b"bb\ncc\n")
    summary = json.loads(result.stdout)
    assert summary["seconds"] >= 0
    del summary["seconds"]
    assert summary == {
        "messages": 2,
        "bytes": 4,
        "first": 1,
        "last": 2,
        "is_flushed": True,
        "level": "flushed",
        "is_reached": True,
        "replicated": 0,
        "merged": 0,
        "reason": None,
        "push_pid": None,
        "session": "feed",
        "directory": str(log.directory),
    }
    assert result.stderr.startswith("2 messages flushed, numbers 1 to 2, 4 B in ")
    assert log.pub_well(stdin=b"a\n").stderr.startswith("1 message flushed, number 3, 1 B in ")
    assert log.pub_well(stdin=b"").stderr.startswith("0 messages flushed, 0 B in ")
    quiet = log.pub_well("--quiet", stdin=b"a\n")
    assert (quiet.stdout, quiet.stderr) == ("", "")


def test_pub_and_sub_read_options_from_environment(tmp_path: Path) -> None:
    run_well(
        *("pub", "--topic", "stronger"),
        stdin=b'{"value": "a"}\n',
        RT_PUB_PATH=str(tmp_path),
        RT_PUB_STREAM="s",
        RT_PUB_NAME="feed",
        RT_PUB_TOPIC="t",
        RT_PUB_FORMAT="json",
        RT_PUB_ENVELOPE="1",
    )
    run_well("pub", stdin=b"b\n", RT_PUB_PATH=str(tmp_path), RT_PUB_STREAM="s", RT_PUB_PUBLISHER_ID="feed")
    found = run_well("sub", tmp_path / DATA, RT_SUB_JSON="1", RT_SUB_TOPIC="stronger other")
    assert [json.loads(line)["topic"] for line in found.stdout.splitlines()] == ["stronger"]
    assert run("sub", tmp_path / DATA, RT_SUB_FORMAT="nope").exit_code == 2


# JSON


def test_json_lines_round_trip_byte_for_byte(log: Log) -> None:
    text = b'{"a": 1}\n[1,2 , 3]\r\n"\\u00e9 \xc3\xa9"\n  null  \n1e5\n' + b"9" * 5000 + b"\n"
    log.pub_well("--format", "json", stdin=text)
    assert log.sub_well("--format", "json") == text


@pytest.mark.parametrize(
    "bad", [b"{", b"", b"nope", b"NaN", b"[Infinity]", b'"\xff"', b"1 2", b"[" * 100_000, b"{'a': 1}"]
)
def test_pub_fails_at_invalid_json_line_and_keeps_earlier_lines(log: Log, tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "in").write_bytes(b"1\n2\n" + bad + b"\n4\n")
    result = log.pub("--format", "json", "--json", tmp_path / "in")
    assert result.exit_code == 1
    assert f"(at {tmp_path / 'in'}, line 3)" in result.stderr
    assert json.loads(result.stdout)["last"] == 1
    assert log.sub_well() == b"1\n2\n"


def test_json_fields_set_topic_and_timestamp(log: Log) -> None:
    lines = [
        {"topic": "a", "at": 5},
        {"topic": "a", "at": "1970-01-01T00:00:01.5Z"},
        {"topic": "b", "at": "1970-01-01T01:00:00+01:00"},
        {"topic": "a", "at": "-3"},
    ]
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    log.pub_well("--format", "json", "--topic-field", "topic", "--timestamp-field", "at", stdin=text)
    with rt.LogReader(log.directory) as reader:
        assert [(message.topic, message.timestamp_ns) for message in reader] == [
            ("a", 5),
            ("a", 1_500_000_000),
            ("b", 0),
            ("a", -3),
        ]
    assert log.sub_well() == text


@pytest.mark.parametrize(
    "bad",
    [
        '{"at": 1}',
        '{"t": 7, "at": 1}',
        '{"t": "x"}',
        '{"t": "x", "at": "noon"}',
        '{"t": "x", "at": true}',
        "[]",
        f'{{"t": "{"x" * 1025}", "at": 1}}',
        '{"t": "\\ud800", "at": 1}',
        '{"t": "x", "at": 99999999999999999999}',
    ],
)
def test_pub_fails_at_missing_or_invalid_json_field_and_keeps_earlier_lines(log: Log, bad: str) -> None:
    text = '{"t": "x", "at": 1}\n' + bad + "\n"
    result = log.pub("--format", "json", "--topic-field", "t", "--timestamp-field", "at", stdin=text.encode())
    assert result.exit_code == 1
    assert "stdin, line 2" in result.stderr
    assert len(log.messages()) == 1


# Envelopes

values = st.lists(
    st.tuples(
        st.binary(max_size=20),
        st.text(max_size=5),
        st.integers(-(2**63), 2**63 - 1),
        st.lists(st.tuples(st.text(min_size=1, max_size=3), st.binary(max_size=5)), max_size=3).map(tuple),
    ),
    max_size=20,
)


@settings(max_examples=15)
@given(messages=values)
def test_envelopes_round_trip_topic_timestamp_value_and_headers(
    fresh: Callable[[], Log], messages: list[tuple[bytes, str, int, Headers]]
) -> None:
    first, second = fresh(), fresh()
    with rt.Publisher(first.root, "s", publisher_id="feed") as publisher:
        for value, topic, timestamp_ns, headers in messages:
            publisher.publish(value, topic, timestamp_ns, headers=headers)
    text = first.sub_well("--json")
    second.pub_well("--format", "json", "--envelope", stdin=text)
    assert second.sub_well("--json") == text
    with rt.LogReader(second.directory) as reader:
        found = [(each.value, each.topic, each.timestamp_ns, each.headers) for each in reader]
    assert found == messages


@pytest.mark.parametrize(
    "bad",
    [
        *("7", "{}", '{"value": 7}', '{"value": "a", "value_base64": "YQ=="}', '{"value_base64": "?"}'),
        *('{"value": "a", "topic": 1}', '{"value": "a", "timestamp_ns": 1.5}', '{"value": "\\ud800"}'),
        *('{"value": "a", "headers": {"k": "v"}}', '{"value": "a", "headers": [{"key": "k"}]}'),
        *('{"value": "a", "headers": [{"key": "", "value": ""}]}', '{"value": "a", "headers": [["k", "v"]]}'),
    ],
)
def test_pub_fails_at_invalid_envelope_and_keeps_earlier_lines(log: Log, bad: str) -> None:
    text = '{"value": "a"}\n{"value_base64": "/w==", "topic": "t", "more": []}\n' + bad + "\n"
    result = log.pub("--format", "json", "--envelope", stdin=text.encode())
    assert result.exit_code == 1
    assert "stdin, line 3" in result.stderr
    assert log.messages() == [("", b"a"), ("t", b"\xff")]


# CSV


def rows_of(text: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text.decode(), newline="")))


cells = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@settings(max_examples=20)
@given(
    rows=st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(cells, min_size=width, max_size=width)))
)
def test_csv_rows_round_trip(fresh: Callable[[], Log], rows: list[list[str]]) -> None:
    log = fresh()
    header = [f"column {index}" for index in range(len(rows[0]) if rows else 1)]
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([header, *rows])
    log.pub_well("--format", "csv", stdin=text.getvalue().encode())
    assert rows_of(log.sub_well("--format", "csv")) == ([header, *rows] if rows else [])


def test_csv_record_becomes_json_object_of_strings(log: Log) -> None:
    text = '\ufeffname,"size, mm",at\r\nnut,"a ""b""\nc",7\r\n\r\nbolt,,1970-01-01T00:00:00Z\r\n'
    log.pub_well("--format", "csv", "--topic-column", "name", "--timestamp-column", "at", stdin=text.encode())
    with rt.LogReader(log.directory) as reader:
        assert [(message.topic, message.timestamp_ns, json.loads(message.value)) for message in reader] == [
            ("nut", 7, {"name": "nut", "size, mm": 'a "b"\nc', "at": "7"}),
            ("bolt", 0, {"name": "bolt", "size, mm": "", "at": "1970-01-01T00:00:00Z"}),
        ]


def test_csv_without_header_uses_column_numbers_as_keys(log: Log) -> None:
    log.pub_well("--format", "csv", "--no-header", "--topic-column", "2", stdin=b"a,b\nc,d\n")
    assert [(topic, json.loads(value)) for topic, value in log.messages()] == [
        ("b", {"1": "a", "2": "b"}),
        ("d", {"1": "c", "2": "d"}),
    ]
    assert log.sub_well("--format", "csv", "--no-header") == b"a,b\nc,d\n"


@pytest.mark.parametrize(
    ("text", "line", "published"),
    [
        (b"a,b\n1,2\n3\n4,5\n", 3, 1),
        (b'a,b\n1,2\n"3\n4",5\n6,7,8\n', 5, 2),
        (b'a,b\n1,2\n3,"4\n', 3, 1),
        (b'a,b\n1,2\n"3"4,5\n', 3, 1),
        (b"a,b\n1,\xff\n", 2, 0),
        (b"a,a\n1,2\n", 1, 0),
    ],
)
def test_pub_fails_at_invalid_csv_row_and_keeps_earlier_rows(
    log: Log, tmp_path: Path, text: bytes, line: int, published: int
) -> None:
    (tmp_path / "in.csv").write_bytes(text)
    result = log.pub("--format", "csv", "--json", tmp_path / "in.csv")
    assert result.exit_code == 1
    assert f"(at {tmp_path / 'in.csv'}, line {line})" in result.stderr
    assert json.loads(result.stdout)["messages"] == published
    assert json.loads(result.stdout)["is_flushed"] is True
    assert len(log.messages()) == published


def test_pub_fails_and_lists_columns_if_topic_column_is_missing(log: Log) -> None:
    result = log.pub("--format", "csv", "--topic-column", "c", stdin=b"a,b\n1,2\n")
    assert result.exit_code == 1
    assert "the column is missing (at stdin, line 1): got a, b, expected c" in result.stderr


def test_csv_output_needs_equal_keys_or_selected_columns(log: Log) -> None:
    log.pub_well(stdin=b'{"a": 1, "b": null}\n{"b": [true], "a": "x"}\n{"a": 2}\n{"a": 3, "b": 4}\n')
    result = log.sub("--format", "csv")
    assert result.exit_code == 1
    assert "(at position 2): got a, expected a, b" in result.stderr
    assert result.stdout == "a,b\n1,\nx,[true]\n"
    assert log.sub_well("--format", "csv", "--columns", "b,c") == b"b,c\n,\n[true],\n,\n4,\n"


@pytest.mark.parametrize(
    ("style", "bad"), [("json", b"{"), ("json", b"[\n]"), ("csv", b"7"), ("csv", b"{"), ("csv", b"\xff")]
)
def test_sub_fails_at_position_of_value_invalid_for_format(log: Log, style: str, bad: bytes) -> None:
    with rt.Publisher(log.root, "s", publisher_id="feed") as publisher:
        for value in (b'{"a":"1"}', b'{"a":"2"}', bad, b'{"a":"3"}'):
            publisher.publish(value)
    result = log.sub("--format", style)
    assert result.exit_code == 1
    assert "(at position 2)" in result.stderr
    assert len(result.stdout.splitlines()) == (2 if style == "json" else 3)


# Files


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


def test_files_round_trip_byte_for_byte(log: Log, tmp_path: Path) -> None:
    source = tmp_path / "source"
    made = {"b": b"two\n", "a/x": b"", "a/y/z z": os.urandom(300_000), "c é": b"\x00\xff", ".hidden": b"h"}
    for name, content in made.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    (source / "link").symlink_to(source / "b")
    (source / "loop").symlink_to(source)
    (tmp_path / "single").write_bytes(b"one")
    log.pub_well("--format", "files", source, tmp_path / "single")
    assert [topic for topic, _ in log.messages()] == [*sorted([*made, "link"]), "single"]
    log.sub_well("--format", "files", "--output", tmp_path / "out")
    assert tree(tmp_path / "out") == made | {"link": b"two\n", "single": b"one"}


def test_pub_fails_at_file_above_size_limit_and_keeps_earlier_files(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b", "c"):
        (source / name).write_bytes(b"x" * (11 if name == "b" else 10))
    monkeypatch.setattr("rt.cli.formats.parsers.MESSAGE_BYTES_MAX", 10)
    result = log.pub("--format", "files", source)
    assert result.exit_code == 1
    assert f"(at {source / 'b'}): got 11 bytes, expected at most 10" in result.stderr
    assert [topic for topic, _ in log.messages()] == ["a"]


def test_pub_fails_and_names_unreadable_file(log: Log) -> None:
    result = log.pub("--quiet", "/proc/self/mem")
    assert result.exit_code == 1
    assert result.stderr == "rt: [Errno 5] Input/output error: '/proc/self/mem'\n"


def test_pub_rejects_file_name_with_invalid_utf_8(log: Log, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with open(os.fsencode(source) + b"/\xff", "wb"):
        pass
    result = log.pub("--format", "files", source)
    assert result.exit_code == 1
    assert "not valid UTF-8" in result.stderr


def hostile(log: Log, topic: str, *, before: str = "fine", output: Path) -> Result:
    with rt.Publisher(log.root, "s", publisher_id="feed") as publisher:
        publisher.publish(b"good", topic=before)
        publisher.publish(b"evil", topic=topic)
        publisher.publish(b"after", topic="after")
    return log.sub("--format", "files", "--output", output)


@pytest.mark.parametrize(
    "topic",
    [
        *("", "..", "../x", "a/../../x", "/etc/x", "//x", "a//b", "a/", "/", ".", "./x", "a/.", "a\0b"),
        *("x" * 256, "d/" * 300 + "../" * 8 + "x", "fine/below"),
    ],
)
def test_sub_fails_at_hostile_topic_and_writes_no_file_outside_output(
    log: Log, tmp_path: Path, topic: str
) -> None:
    output = tmp_path / "deep" / "output"
    result = hostile(log, topic, output=output)
    assert result.exit_code == 1
    assert "(at position 1)" in result.stderr
    assert tree(tmp_path / "deep") == {"output/fine": b"good"}


def test_planted_symlinks_in_output_are_never_followed(log: Log, tmp_path: Path) -> None:
    outside, output = tmp_path / "outside", tmp_path / "output"
    outside.mkdir()
    output.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (output / "directory").symlink_to(outside)
    (output / "file").symlink_to(outside / "secret")
    (output / "dangling").symlink_to(outside / "new")
    result = hostile(log, "directory/secret", before="file", output=output)
    assert result.exit_code == 1
    assert tree(outside) == {"secret": b"secret"}
    assert (output / "file").read_bytes() == b"good"
    assert not (output / "file").is_symlink()
    assert hostile(Log(tmp_path / "two"), "dangling", output=output).exit_code == 0
    assert tree(outside) == {"secret": b"secret"}
    assert (output / "dangling").read_bytes() == b"evil"


def test_sub_fails_if_path_of_topic_is_a_directory(log: Log, tmp_path: Path) -> None:
    (tmp_path / "output" / "taken" / "x").mkdir(parents=True)
    result = hostile(log, "taken", output=tmp_path / "output")
    assert result.exit_code == 1
    assert "(at position 1)" in result.stderr
    assert not list((tmp_path / "output").glob(".rt-*"))


def test_output_file_keeps_old_content_if_write_fails(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "bad").write_bytes(b"old")

    def fail(descriptor: int, value: bytes) -> None:
        os.write(descriptor, value[:2])
        raise OSError(28, "No space left on device")

    log.pub_well("--topic", "bad", stdin=b"new\n")
    monkeypatch.setattr(writers, "_write_all", fail)
    result = log.sub("--format", "files", "--output", output)
    assert result.exit_code == 1
    assert "disk full" in result.stderr
    assert tree(output) == {"bad": b"old"}


def test_repeated_topic_replaces_its_output_file(log: Log, tmp_path: Path) -> None:
    log.pub_well("--topic", "t", stdin=b"one\ntwo\n")
    log.sub_well("--format", "files", "--output", tmp_path / "output")
    assert tree(tmp_path / "output") == {"t": b"two"}


# Misuse


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "lines", "--envelope"],
        ["--format", "json", "--no-header"],
        ["--format", "lines", "--topic-field", "t"],
        ["--format", "json", "--envelope", "--timestamp-field", "t"],
        ["--format", "files"],
        ["--format", "files", "-"],
        ["--format", "files", "--topic", "t", "."],
        ["."],
        ["missing-file"],
        ["--topic", "x" * 1025],
        ["--batch-bytes", "7"],
        ["--fsync", "often"],
        ["--stream", "a/b"],
        ["--dedup-id", ""],
        ["--unknown"],
    ],
)
def test_invalid_pub_options_exit_with_2_and_publish_no_messages(log: Log, arguments: list[str]) -> None:
    result = log.pub(*arguments, stdin=b"a\n")
    assert result.exit_code == 2
    assert not log.root.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "--format", "csv"],
        ["--columns", "a"],
        ["--no-header"],
        ["--format", "files"],
        ["--output", "x"],
        ["--position", "now"],
        ["--position", "-1"],
        ["--position", "1", "--since", "2020-01-01T00:00:00Z"],
        ["--since", "yesterday"],
        ["--since", "15M"],
        ["--since", "2026-13-01"],
        ["--path", "x"],
        ["--position", "99"],
        ["--name", "a/b"],
    ],
)
def test_invalid_sub_options_exit_with_2_and_print_no_messages(log: Log, arguments: list[str]) -> None:
    log.pub_well(stdin=b"a\n")
    result = log.sub(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_sub_without_merged_log_fails_and_lists_sessions(log: Log) -> None:
    log.pub_well(stdin=b"a\n")
    assert run("sub").exit_code == 2
    result = run("sub", "--path", log.root, "--stream", "s")
    assert result.exit_code == 1
    assert "no merged log of s" in result.stderr
    assert "feed" in result.stderr


# Start positions


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], b"0 1 2 3 4"),
        (["--position", "earliest"], b"0 1 2 3 4"),
        (["--position", "latest"], b""),
        (["--position", "3"], b"3 4"),
        (["--position", "5"], b""),
        (["--since", "1970-01-01T00:00:02Z"], b"2 3 4"),
        (["--since", "1500000000"], b"2 3 4"),
        (["--since", "1970-01-01"], b"0 1 2 3 4"),
        (["--since", "1970-01-02"], b""),
        (["--since", "1w"], b""),
        (["--limit", "2"], b"0 1"),
        (["--limit", "0"], b""),
        (["--topic", "t1"], b"1 3"),
        (["--topic", "t1", "--limit", "1"], b"1"),
        (["--topic", "t1", "--topic", "t0", "--position", "2"], b"2 3 4"),
    ],
)
@pytest.mark.parametrize("named", [[], ["--name", "reader"]])
def test_sub_obeys_position_since_limit_and_topic_options(
    log: Log, options: list[str], expected: bytes, named: list[str]
) -> None:
    with rt.Publisher(log.root, "s", publisher_id="feed") as publisher:
        for number in range(5):
            publisher.publish(b"%d" % number, topic=f"t{number % 2}", timestamp_ns=number * 1_000_000_000)
    assert log.sub_well(*options, *named).split() == expected.split()


def test_named_subscriber_resumes_at_acknowledged_position(log: Log, tmp_path: Path) -> None:
    log.pub_well(stdin=b"0\n1\n2\n3\n")
    assert log.sub_well("--name", "a", "--limit", 3) == b"0\n1\n2\n"
    assert log.sub_well("--name", "a") == b"3\n"
    assert log.sub_well("--name", "a") == b""
    assert log.sub_well("--name", "b", "--limit", 1) == b"0\n"
    log.pub_well("--topic", "file", stdin=b"4\n")
    log.sub_well("--name", "a", "--format", "files", "--output", tmp_path / "out")
    assert tree(tmp_path / "out") == {"file": b"4"}
    assert log.sub_well("--name", "a") == b""


def test_named_subscriber_acknowledges_no_messages_if_output_fails(log: Log) -> None:
    log.pub_well(stdin=b"1\n2\nno json\n")
    assert log.sub("--name", "a", "--format", "json").exit_code == 1
    assert log.sub_well("--name", "a") == b"1\n2\nno json\n"


def test_sub_finds_merged_log_by_stream_name(log: Log) -> None:
    log.pub_well(stdin=b"a\nb\n")
    with MergedLogBuilder(log.root / "s" / "merged", cluster_id=bytes(16), stream="s") as merged:
        merged.merge(log.directory)
    found = run_well("sub", "--path", log.root, "--stream", "s", "--json")
    assert [json.loads(line)["session"] for line in found.stdout.splitlines()] == ["feed", "feed"]


def test_sub_reports_unreadable_messages_and_exits_with_1(log: Log) -> None:
    writer = LogWriter.open(str(log.directory), LogIdentity(LogKind.SESSION, bytes(16), "feed"))
    writer.start(SegmentId(0, 0), first=0)
    for number, text in enumerate((b"t", b"\xff", b"t")):
        assert writer.active is not None
        batch = forge(
            columns([0, 8], [0], [], [0, 1], text),
            b"8 bytes.",
            seed=batch_seed(writer.active.seed, writer.offset),
            first=number,
        )
        writer.append([BatchFrames([batch], number + 1, 0, 0)])
    writer.sync()
    writer.close()
    result = log.sub()
    assert result.exit_code == 1
    assert result.stdout == "8 bytes.\n8 bytes.\n"
    assert "messages 1 to 1" in result.stderr


# A full disk


class Full:
    """A disk for `rt pub` that is full after `capacity_bytes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capacity_bytes: int) -> None:
        self.disk = FaultyDisk(REAL, capacity_bytes=capacity_bytes)
        self.waits = 0
        self.publishers: list[rt.Publisher] = []
        monkeypatch.setattr("rt.cli.commands.pub.Publisher", self.open)
        shadow(monkeypatch, publish_loop, "time", sleep=self.sleep)

    def open(self, *arguments: Any, **options: Any) -> rt.Publisher:
        self.publishers.append(rt.Publisher(*arguments, **options, disk=self.disk))
        return self.publishers[-1]

    def sleep(self, seconds: float) -> None:
        """Free a little disk space at each call."""
        self.waits += 1
        assert self.disk.capacity_bytes is not None
        self.disk.capacity_bytes += 3_000


LINES = b"".join(b"line %d\n" % number for number in range(20_000))


@pytest.mark.parametrize("style", [[], ["--format", "json", "--topic-field", "t"]])
def test_pub_waits_out_full_disk_without_losing_or_duplicating_lines(
    log: Log, monkeypatch: pytest.MonkeyPatch, style: list[str]
) -> None:
    monkeypatch.setattr(parsers, "READ_BYTES", 50_000)
    full = Full(monkeypatch, 20_000)
    text = LINES if not style else b"".join(b'{"t": "%d"}\n' % (number // 3000) for number in range(20_000))
    result = log.pub_well("--batch-bytes", 4096, "--json", *style, stdin=text)
    assert full.waits > 3
    assert result.stderr.count("Waiting for space") >= 1
    assert log.sub_well() == text
    summary = json.loads(result.stdout)
    assert (summary["messages"], summary["first"], summary["last"]) == (20_000, 0, 19_999)


@pytest.mark.parametrize(("read_bytes", "is_flushed"), [(4096, True), (64, False)])
def test_pub_with_on_full_fail_exits_with_1_on_full_disk_and_reports_progress(
    log: Log, monkeypatch: pytest.MonkeyPatch, read_bytes: int, is_flushed: bool
) -> None:
    monkeypatch.setattr(parsers, "READ_BYTES", read_bytes)
    full = Full(monkeypatch, 20_000)
    result = log.pub("--batch-bytes", 4096, "--json", "--on-full", "fail", stdin=LINES)
    assert result.exit_code == 1
    assert full.waits == 0
    assert "rt: disk full" in result.stderr
    assert ("may not be synced to disk" in result.stderr) is not is_flushed
    summary = json.loads(result.stdout)
    assert 0 < summary["messages"] < 20_000
    assert summary["is_flushed"] is is_flushed
    full.disk.capacity_bytes = None
    full.publishers[0].close()
    assert log.sub_well() == b"".join(LINES.splitlines(keepends=True)[: summary["messages"]])


class Stub:
    """A publisher that is sometimes full, and keeps the messages that it accepts."""

    def __init__(self, takes: list[int]) -> None:
        self.kept: list[tuple[bytes, int]] = []
        self._takes = takes

    def publish_many(
        self, values: list[bytes], topic: str, stamps: list[int] | None, headers: object
    ) -> range:
        assert not headers
        assert stamps is not None
        first = len(self.kept)
        taken = self._takes.pop(0) if self._takes else len(values)
        self.kept += zip(values[:taken], stamps[:taken], strict=True)
        if taken < len(values):
            raise rt.DiskFull("full", accepted=range(first, first + taken))
        return range(first, first + taken)


def test_messages_accepted_before_disk_was_full_are_not_published_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shadow(monkeypatch, publish_loop, "time", sleep=lambda seconds: None)
    stub, fed = Stub([2, 0, 5, 0, 0]), publish_loop.PublishedCount()
    feeding = publish_loop.PublishLoop(stub, Interrupts(), fed, on_full="wait", bar=None)  # type: ignore[arg-type]
    for number in range(20):
        feeding.add(b"%d" % number, "t", number)
    feeding.push()
    assert stub.kept == [(b"%d" % number, number) for number in range(20)]
    assert (fed.message_count, fed.first, fed.end) == (20, 0, 20)


# Real processes


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "rt", *map(str, arguments)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def processes() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command(*arguments), **(pipes | options)))
        return started[-1]

    with nothing_left():  # A push client outlives its publisher until the nodes have everything.
        yield start
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_pub_and_sub_processes_round_trip_lines_through_pipes(
    log: Log, processes: Callable[..., subprocess.Popen[bytes]]
) -> None:
    text = b"".join(b"%d %s\n" % (number, b"x" * (number % 50)) for number in range(50_000))
    done = processes("pub", "--path", log.root, "--stream", "s", "--name", "feed")
    out, err = done.communicate(text)
    assert (done.returncode, out) == (0, b"")
    assert err.startswith(b"50,000 messages flushed, numbers 0 to 49999, ")
    done = processes("sub", log.directory)
    out, err = done.communicate()
    assert (done.returncode, err) == (0, b"")
    assert out == text


@pytest.mark.slow
@pytest.mark.parametrize("sub", [["sub", "{}"], ["sub", "--json", "{}"], ["log", "dump", "{}"]])
def test_closed_output_pipe_ends_command_with_0_and_no_error(log: Log, sub: list[str]) -> None:
    log.pub_well(stdin=b"".join(b"%d\n" % number for number in range(200_000)))
    line = " ".join(command(*(word.format(log.directory) for word in sub)))
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -1; exit ${{PIPESTATUS[0]}}"], capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == b""
    assert done.stdout.count(b"\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_pub_flushes_complete_lines_already_read(
    log: Log, processes: Callable[..., subprocess.Popen[bytes]], number: int, status: int
) -> None:
    process = processes("pub", "--path", log.root, "--stream", "s", "--name", "feed", "--json")
    assert process.stdin is not None
    process.stdin.write(b"one\ntwo\nhalf a li")
    process.stdin.flush()
    wait_for(lambda: (log.directory / "log.0.0").exists() and (log.directory / "log.0.0").stat().st_size > 64)
    process.send_signal(number)
    assert process.wait(DEADLINE_SECONDS) == status
    out, err = process.communicate()
    assert json.loads(out)["messages"] == 2
    assert json.loads(out)["is_flushed"] is True
    assert err.startswith(b"2 messages flushed, numbers 0 to 1, ")
    assert log.sub_well() == b"one\ntwo\n"


@pytest.mark.slow
@pytest.mark.parametrize("named", [[], ["--name", "reader"]])
def test_sub_with_follow_prints_new_messages_until_interrupted(
    log: Log, processes: Callable[..., subprocess.Popen[bytes]], named: list[str]
) -> None:
    with rt.Publisher(log.root, "s", publisher_id="feed") as publisher:
        publisher.publish(b"first")
        publisher.flush()
        process = processes("sub", "--follow", log.directory, *named)
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        publisher.publish(b"second")
        assert process.stdout.readline() == b"second\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
        assert (process.returncode, err) == (143, b"")
    assert log.sub_well(*named) == (b"" if named else b"first\nsecond\n")


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--quiet"]])
def test_pub_shows_progress_bar_on_terminal_unless_quiet(
    log: Log, tmp_path: Path, processes: Callable[..., subprocess.Popen[bytes]], options: list[str]
) -> None:
    (tmp_path / "in").write_bytes(b"a\n")
    with terminal() as (shown, slave):
        process = processes(
            "pub", "--path", log.root, "--stream", "s", *options, tmp_path / "in", stderr=slave
        )
        os.close(slave)
        text = shown()
        assert process.wait(DEADLINE_SECONDS) == 0
    assert (b"publishing" in text) is not bool(options)
    assert (b"1 message flushed" in text) is not bool(options)


@contextlib.contextmanager
def terminal() -> Iterator[tuple[Callable[[], bytes], int]]:
    """Return a function that reads all output of a terminal, and the descriptor to write to."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def shown() -> bytes:
        text = b""
        with contextlib.suppress(OSError):
            while data := os.read(master, 4096):
                text += data
        return text

    try:
        yield shown, slave
    finally:
        os.close(master)


# With nodes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sub", "--path", ".", "--stream", "s", "--endpoints", "n1:1"], "--endpoints needs --ca, --cert"),
        (["sub", ".", "--ca", __file__], "need --endpoints"),
        (
            ["pub", "--path", ".", "--stream", "s", "--endpoints", "n1:1", "--ca", __file__],
            "--endpoints needs",
        ),
        (["pub", "--path", ".", "--stream", "s", "--key", __file__], "need --endpoints"),
    ],
)
def test_endpoints_without_certificates_or_certificates_without_endpoints_exit_with_2(
    arguments: list[str], message: str
) -> None:
    result = run(*arguments, stdin=b"")
    assert (result.exit_code, message in result.stderr) == (2, True)


def test_sub_with_endpoints_and_directory_exits_with_2(tmp_path: Path) -> None:
    pki = make_pki(tmp_path / "pki")
    result = run("sub", ".", "--endpoints", "n1:1", *tls_options(pki, "sub"))
    assert (result.exit_code, "--endpoints excludes DIR" in result.stderr) == (2, True)


@pytest.mark.slow
def test_sub_with_endpoints_starts_at_time_of_since(
    tmp_path: Path, processes: Callable[..., subprocess.Popen[bytes]]
) -> None:
    pki = make_pki(tmp_path / "pki")
    with pull_source(tmp_path / "node", pki) as source:
        now_ns = time.time_ns()
        for hours in range(6, 0, -1):
            source.publish(b"%d" % hours, timestamps_ns=[now_ns - hours * 3600 * 10**9])
            source.roll()
        nodes = ["--stream", "s", "--endpoints", source.endpoint, *tls_options(pki, "sub")]
        for since, text in (
            ("150m", b"2\n1\n"),
            (str(now_ns - 4 * 3600 * 10**9), b"4\n3\n2\n1\n"),
            ("0s", b""),
        ):
            done = processes("sub", *nodes, "--path", tmp_path / since, "--since", since)
            assert done.communicate(timeout=DEADLINE_SECONDS) == (text, b"")
            assert done.returncode == 0
        pulling = processes("pull", tmp_path / "copy", *nodes, "--since", "210m")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (durable := read_durable_end(REAL, str(tmp_path / "copy"))) is None or durable.end < 6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pulling.send_signal(signal.SIGTERM)
        pulling.communicate(timeout=DEADLINE_SECONDS)
        assert sorted(path.name for path in (tmp_path / "copy").glob("log.*"))[:1] == ["log.0.3"]
        assert run_well("sub", tmp_path / "copy", "--since", "150m").stdout_bytes == b"2\n1\n"


def tls_options(pki: Path, name: str) -> list[str]:
    files = {"ca": "ca.crt", "cert": f"{name}.crt", "key": f"{name}.key"}
    return [f"--{option}={pki / file}" for option, file in files.items()]


@pytest.mark.slow
def test_sub_with_endpoints_prints_messages_of_nodes_and_exits(
    tmp_path: Path, processes: Callable[..., subprocess.Popen[bytes]]
) -> None:
    pki = make_pki(tmp_path / "pki")
    with pull_source(tmp_path / "node", pki) as source:
        options = ["--path", tmp_path, "--stream", "s", "--endpoints", source.endpoint]
        options += ["--connect-timeout", "0"]
        options += tls_options(pki, "sub")
        source.publish(b"one", b"two", topic="a")
        source.publish(b"three", topic="b")
        source.publish(b"four", topic="c")
        for named, texts in ((["--name", "sub"], [b"one\ntwo\nthree\nfour\n", b""]), ([], [b"one\n"])):
            for text in texts:
                more = [] if named else ["--limit", "1"]
                done = processes("sub", *options, *named, *more)
                assert done.communicate(timeout=DEADLINE_SECONDS) == (text, b"")
                assert done.returncode == 0
        done = processes("sub", *options, "--topic", "b")
        assert done.communicate(timeout=DEADLINE_SECONDS) == (b"three\n", b"")
        following = processes("sub", *options, "--follow", "--name", "sub")
        source.publish(b"five")
        assert following.stdout is not None
        assert following.stdout.readline() == b"five\n"
        following.send_signal(signal.SIGTERM)
        _, err = following.communicate(timeout=DEADLINE_SECONDS)
        assert (following.returncode, err) == (143, b"")
        wrong = processes("sub", *options[:-3], *tls_options(pki, "feed"))
        _, err = wrong.communicate(timeout=DEADLINE_SECONDS)
        assert wrong.returncode == 1
        assert b"rt: this role may not call" in err


@pytest.mark.parametrize("level", ["replicated", "merged"])
def test_level_replicated_or_merged_without_endpoints_exits_with_2(log: Log, level: str) -> None:
    result = log.pub("--level", level, stdin=b"a\n")
    assert (result.exit_code, f"--level {level} needs --endpoints" in result.stderr) == (2, True)
    assert not log.directory.exists()


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e10", "soon"])
def test_invalid_timeout_exits_with_2(log: Log, seconds: str) -> None:
    result = log.pub("--timeout", seconds, stdin=b"a\n")
    assert (result.exit_code, "'--timeout'" in result.stderr) == (2, True)


class Cluster:
    """A node that accepts pushes and can be stopped, and the command that publishes to it."""

    def __init__(self, root: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
        self.root, self._start = root, start
        self.pki = make_pki(root / "pki")
        self.tls = tls_of(self.pki, "n1")
        self.node = PushNode("n1", members=1)

    def start(self, *options: object, **pipes: Any) -> subprocess.Popen[bytes]:
        arguments = ["pub", "--path", self.root, "--stream", "s", "--name", "feed", *options]
        endpoints = ["--endpoints", self.node.endpoint, *tls_options(self.pki, "feed")]
        return self._start(*arguments, *endpoints, **pipes)

    def pub(self, text: bytes, *options: object) -> tuple[int, dict[str, Any], str]:
        """Return the exit status, the summary and the text on stderr."""
        process = self.start("--json", *options)
        out, err = process.communicate(text, timeout=DEADLINE_SECONDS)
        return process.returncode, json.loads(out), err.decode()


@pytest.fixture
def cluster(tmp_path: Path, processes: Callable[..., subprocess.Popen[bytes]]) -> Cluster:
    return Cluster(tmp_path, processes)


@pytest.mark.slow
def test_pub_waits_until_messages_reach_level_and_reports_it(cluster: Cluster) -> None:
    with NodesInThread(cluster.node, tls=cluster.tls):
        status, summary, said = cluster.pub(b"one\ntwo\nthree\n")
        assert status == 0
        assert said.startswith("3 messages merged, numbers 0 to 2, 11 B in ")
        assert (summary["level"], summary["is_reached"], summary["reason"]) == ("merged", True, None)
        assert (summary["replicated"], summary["merged"]) == (3, 3)
        assert cluster.node.holds(cluster.root / DATA)
        status, summary, said = cluster.pub(b"four\n", "--level", "replicated")
        assert (status, said.startswith("1 message replicated, number 3, ")) == (0, True)
        status, summary, said = cluster.pub(b"")
        assert (status, said.startswith("0 messages merged, 0 B in ")) == (0, True)


@pytest.mark.slow
def test_pub_without_reachable_node_times_out_and_its_push_process_sends_later(
    cluster: Cluster,
) -> None:
    status, summary, said = cluster.pub(b"one\ntwo\n", "--timeout", "0.5")
    assert status == 1
    assert "2 messages flushed, 0 replicated, 0 merged, numbers 0 to 1, " in said
    assert "rt: 2 of 2 messages are not merged: timed out after 0.5 s. All are on disk, in " in said
    assert f"in {cluster.root / DATA}. Process {summary['push_pid']} continues to send them." in said
    assert (summary["level"], summary["is_reached"], summary["reason"]) == ("merged", False, "timeout")
    assert (summary["replicated"], summary["merged"], summary["is_flushed"]) == (0, 0, True)
    assert kept_values(cluster.root / DATA) == [b"one", b"two"]
    with NodesInThread(cluster.node, tls=cluster.tls):  # The push process still runs and sends the messages.
        wait_for(lambda: cluster.node.holds(cluster.root / DATA))


@pytest.mark.slow
def test_pub_fails_if_replicated_messages_are_not_merged_in_time(cluster: Cluster) -> None:
    cluster.node.merges = False
    with NodesInThread(cluster.node, tls=cluster.tls):
        assert cluster.pub(b"one\n", "--level", "replicated")[0] == 0
        status, summary, said = cluster.pub(b"two\n", "--timeout", "3", "--quiet")
    assert (status, summary["merged"], summary["reason"]) == (1, 0, "timeout")
    assert said.startswith("rt: 1 of 1 message is not merged: ")


@pytest.mark.slow
def test_pub_with_level_flushed_does_not_wait_for_nodes(cluster: Cluster) -> None:
    status, summary, said = cluster.pub(b"one\n", "--level", "flushed")
    assert (status, summary["level"], summary["is_reached"]) == (0, "flushed", True)
    assert "1 message flushed, number 0, " in said
    with NodesInThread(cluster.node, tls=cluster.tls):
        wait_for(lambda: cluster.node.holds(cluster.root / DATA))


@pytest.mark.slow
def test_pub_fails_before_timeout_if_nodes_refuse_session(cluster: Cluster) -> None:
    cluster.node.refusal = rt.InvalidName("another stream is served here")
    with NodesInThread(cluster.node, tls=cluster.tls):
        status, summary, said = cluster.pub(b"one\n", "--timeout", "3600")
    assert (status, summary["reason"]) == (1, "refused")
    assert said.count("rt: 1 of 1 message is not merged: another stream is served here") == 1
    assert "Once the cause is fixed it is sent, by this publisher, the next one or `rt push`" in said


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_wait_for_merge_and_push_process_sends_later(
    cluster: Cluster, number: int, status: int
) -> None:
    process = cluster.start("--json", "--timeout", "3600")
    assert process.stdin is not None
    process.stdin.write(b"one\n")
    process.stdin.close()
    process.stdin = None
    wait_for(lambda: is_log_directory(REAL, str(cluster.root / DATA)))
    wait_for(lambda: kept_values(cluster.root / DATA) == [b"one"])
    process.send_signal(number)
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == status
    summary = json.loads(out)
    assert (summary["is_flushed"], summary["is_reached"], summary["reason"]) == (True, False, "interrupted")
    assert "rt: 1 of 1 message is not merged: interrupted. All are on disk, in " in err.decode()
    with NodesInThread(cluster.node, tls=cluster.tls):
        wait_for(lambda: cluster.node.holds(cluster.root / DATA))


@pytest.mark.slow
def test_wait_for_merge_shows_progress_bar_on_terminal(cluster: Cluster) -> None:
    (cluster.root / "in").write_bytes(b"a\n")
    with terminal() as (shown, slave):
        process = cluster.start("--timeout", "2", cluster.root / "in", stderr=slave)
        os.close(slave)
        text = shown()
        assert process.wait(DEADLINE_SECONDS) == 1
    assert b"waiting until merged" in text
    with NodesInThread(cluster.node, tls=cluster.tls):
        wait_for(lambda: cluster.node.holds(cluster.root / DATA))


def kept_values(directory: Path) -> list[bytes]:
    with rt.LogReader(directory, on_event=lambda _: None) as reader:
        return [message.value for message in reader]


def test_headers_round_trip_through_pub_and_sub(tmp_path: Path) -> None:
    runner = CliRunner()
    where = ["--path", str(tmp_path), "--stream", "s"]
    given = ["--header", "kind=a=b", "--header", "raw=x"]
    assert runner.invoke(cli, ["pub", *where, "--name", "one", *given], input="v\n").exit_code == 0
    shown = runner.invoke(cli, ["sub", str(tmp_path / "s/sessions/one"), "--json"]).stdout
    assert json.loads(shown)["headers"] == [{"key": "kind", "value": "a=b"}, {"key": "raw", "value": "x"}]
    again = ["pub", *where, "--name", "two", "--format", "json", "--envelope"]
    assert runner.invoke(cli, again, input=shown).exit_code == 0
    with rt.LogReader(tmp_path / "s/sessions/two") as reader:
        assert [message.headers for message in reader] == [(("kind", b"a=b"), ("raw", b"x"))]
    dumped = runner.invoke(cli, ["log", "dump", str(tmp_path / "s/sessions/two")]).stdout
    assert "kind=a=b  raw=x" in dumped
    refused = runner.invoke(cli, ["pub", *where, "--header", "none"], input="v\n")
    assert (refused.exit_code, "KEY=VALUE" in refused.output) == (2, True)
