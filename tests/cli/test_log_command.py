"""`rt log`: output and exit status of stat, dump, verify and compare."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import rt
from rt.cli.main import cli
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import read_table
from rt.log.write.writer import LogWriter
from rt.testing.merged import MergedLogBuilder

SECOND = 1_000_000_000


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], env=environment)


def run_well(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def objects(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a log of nine messages in three segments. The first segment is trimmed, and the last one is
    active.
    """
    for life in range(3):
        with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=10_000) as publisher:
            for number in range(life * 3, life * 3 + 3):
                publisher.publish(b"value %d" % number, topic=f"t{number % 2}", timestamp_ns=number * SECOND)
    path = Path(publisher.directory)
    table = read_table(REAL, str(path))
    assert table is not None
    writer = LogWriter.open(str(path), table.identity)
    writer.trim(SegmentId(1, 0), TrimReason.SIZE)
    writer.close()
    return path


def copy(source: Path, name: str = "copy") -> Path:
    return Path(shutil.copytree(source, source.parent / name))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


# stat


def test_stat_prints_each_segment_and_summary_of_log(directory: Path) -> None:
    with rt.Publisher(directory.parents[2], "s", publisher_id="feed") as publisher:
        publisher.publish(b"live", timestamp_ns=9 * SECOND)
        publisher.flush()
        lines = run_well("log", "stat", directory).stdout.splitlines()
    assert lines[0].startswith(f"{directory}: session feed, incarnation ")
    assert lines[1].startswith("durable end: log.3.0 at offset ")
    cells = [line.split() for line in lines[3:-1]]
    assert [row[:5] for row in cells] == [
        ["log.0.0", "trimmed", "0", "3", "3"],
        ["log.1.0", "sealed", "3", "6", "3"],
        ["log.2.0", "sealed", "6", "9", "3"],
        ["log.3.0", "active", "9", "10", "1"],
    ]
    assert "(size)" in lines[3]
    assert "1970-01-01T00:00:03.000Z  1970-01-01T00:00:05.000Z" in lines[4]
    assert "1970-01-01T00:00:09.000Z  1970-01-01T00:00:09.000Z" in lines[6]
    assert "3 segments kept, 1 trimmed; 7 messages, 3 to 10;" in lines[-1]


def test_stat_prints_one_json_object_per_directory(directory: Path) -> None:
    first, second = objects(run_well("log", "stat", "--json", directory, copy(directory)))
    assert first["directory"] == str(directory)
    assert (first["kind"], first["name"], first["start"], first["end"]) == ("session", "feed", 3, 9)
    assert {name: first[name] for name in ("messages", "dedup_id")} == {"messages": 6, "dedup_id": None}
    assert first["durable"] is not None
    trimmed, sealed, newest = first["segments"]
    assert (trimmed["state"], trimmed["trim_reason"], trimmed["messages"]) == ("trimmed", "size", 3)
    assert (sealed["timestamp_low_ns"], sealed["timestamp_high_ns"]) == (3 * SECOND, 5 * SECOND)
    assert newest["sealed_ns"] > newest["created_ns"] > 0
    assert first["segments"] == second["segments"]


def test_stat_of_directory_without_log_exits_with_1(tmp_path: Path) -> None:
    result = run("log", "stat", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("rt: no log directory")
    assert run("log", "stat", tmp_path / "missing").exit_code == 2


# dump


def test_dump_escapes_unprintable_characters_of_messages(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        for value, topic in (
            (b"plain \xc3\xa9", "t"),
            (b"\x1b[2J\n\\\xff\x00", ""),
            ("\u202e".encode(), "\x07"),
        ):
            publisher.publish(value, topic=topic, timestamp_ns=SECOND + 5)
    assert run_well("log", "dump", publisher.directory).stdout.splitlines() == [
        "0  1970-01-01T00:00:01.000000005Z  feed/0#0  t  plain é",
        r"1  1970-01-01T00:00:01.000000005Z  feed/0#1  -  \x1b[2J\n\\\xff\x00",
        r"2  1970-01-01T00:00:01.000000005Z  feed/0#2  \x07  " + "\\u202e",
    ]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ([], [3, 4, 5, 6, 7, 8]),
        (["--from", 5], [5, 6, 7, 8]),
        (["--to", 5], [3, 4]),
        (["--from", 4, "--to", 7], [4, 5, 6]),
        (["--from", 4, "--to", 4], []),
        (["--from", 9], []),
        (["--limit", 2], [3, 4]),
        (["--limit", 0], []),
        (["--from", 4, "--limit", 3, "--to", 6], [4, 5]),
        (["--topic", "t0"], [4, 6, 8]),
        (["--topic", "t0", "--topic", "t1", "--from", 7], [7, 8]),
        (["--topic", "t0", "--limit", 2], [4, 6]),
    ],
)
def test_dump_prints_only_messages_selected_by_options(
    directory: Path, options: list[object], numbers: list[int]
) -> None:
    lines = run_well("log", "dump", directory, *options).stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == numbers
    found = objects(run_well("log", "dump", directory, "--json", *options))
    assert [message["number"] for message in found] == numbers


def test_dump_reports_trimmed_messages_and_continues_after_them(directory: Path) -> None:
    result = run_well("log", "dump", directory, "--from", 1)
    assert result.stderr == "rt: messages 1 to 2 are missing (size): continuing at 3\n"
    assert len(result.stdout.splitlines()) == 6


def test_dump_from_beyond_end_exits_with_2(directory: Path) -> None:
    result = run("log", "dump", directory, "--from", 10)
    assert result.exit_code == 2
    assert "beyond the end" in result.stderr


@pytest.mark.parametrize("option", ["--from", "--to"])
@pytest.mark.parametrize("more", [[], ["--batches"]])
def test_dump_with_position_out_of_range_exits_with_2(directory: Path, option: str, more: list[str]) -> None:
    result = run("log", "dump", directory, option, 2**63, *more)
    assert result.exit_code == 2
    assert f"'{option}': {2**63} is not in the range" in result.stderr


def test_dump_prints_message_envelopes_as_json(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publisher.publish('quote " \u2028 é'.encode(), topic='a"b', timestamp_ns=7)
        publisher.publish(b"\xff\x00", timestamp_ns=8)
    assert objects(run_well("log", "dump", publisher.directory, "--json")) == [
        {
            "position": 0,
            "timestamp_ns": 7,
            "session": "feed",
            "run": 0,
            "number": 0,
            "topic": 'a"b',
            "value": 'quote " \u2028 é',
        },
        {
            "position": 1,
            "timestamp_ns": 8,
            "session": "feed",
            "run": 0,
            "number": 1,
            "topic": "",
            "value_base64": base64.b64encode(b"\xff\x00").decode(),
        },
    ]


def test_dump_prints_batches_of_sessions_and_merged_logs(directory: Path, tmp_path: Path) -> None:
    with MergedLogBuilder(tmp_path / "merged", cluster_id=bytes(16), stream="s") as merged:
        merged.merge(directory, segment=SegmentId(1, 0), skip=1)
        merged.merge(directory, segment=SegmentId(2, 0))
    assert [
        (batch["segment"], batch["offset"], batch["first_position"], batch["messages"], batch["session"])
        for batch in objects(run_well("log", "dump", directory, "--batches", "--json"))
    ] == [("log.1.0", 64, 3, 3, "feed"), ("log.2.0", 64, 6, 3, "feed")]
    found = objects(run_well("log", "dump", merged.path, "--batches", "--json"))
    assert [(batch["first_position"], batch["messages"], batch["first_number"]) for batch in found] == [
        (0, 2, 3),
        (2, 3, 6),
    ]
    lines = run_well("log", "dump", merged.path, "--batches").stdout.splitlines()
    assert "0 to 1 (1 skipped)  feed/1#3" in lines[0]
    assert "2 to 4  feed/2#6" in lines[1]
    for options, count in (
        (["--from", 2], 1),
        (["--to", 2], 1),
        (["--limit", 1], 1),
        (["--from", 1, "--to", 3], 2),
    ):
        assert len(run_well("log", "dump", merged.path, "--batches", *options).stdout.splitlines()) == count
    assert run("log", "dump", merged.path, "--batches", "--follow").exit_code == 2


def test_dump_of_corrupt_log_prints_preceding_messages_and_exits_with_1(directory: Path) -> None:
    flip(directory / "log.2.0", 100)
    for options in ([], ["--batches"]):
        result = run("log", "dump", directory, *options)
        assert result.exit_code == 1
        assert f"(at {directory / 'log.2.0'}, offset 64)" in result.stderr
        assert result.stdout.count("\n") == (1 if options else 3)


# verify


def test_verify_of_intact_logs_exits_with_0(directory: Path) -> None:
    result = run_well("log", "verify", directory, copy(directory))
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{directory}: intact: session feed")
    assert "6 messages in 2 batches, 2 segments" in first
    assert "copy: intact" in second
    assert result.stderr == ""


def test_verify_names_corrupt_segment_of_any_directory_and_exits_with_1(
    directory: Path, tmp_path: Path
) -> None:
    bad = copy(directory, "bad")
    flip(bad / "log.1.0", 70)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = run("log", "verify", bad, empty, directory)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"damage: {bad / 'log.1.0'}, offset 64: ")
    assert lines[1].startswith(f"{bad}: CORRUPT")
    assert lines[2].startswith(f"{directory}: intact")
    assert result.stderr.startswith(f"rt: no log directory (at {empty})")


def test_verify_prints_one_json_object_per_directory(directory: Path) -> None:
    flip(directory / "log.1.0", 70)
    result = run("log", "verify", "--json", directory)
    assert result.exit_code == 1
    (found,) = objects(result)
    assert found["is_damaged"] is True
    assert [segment["messages"] for segment in found["segments"]] == [0, 0, 3]
    (problem,) = found["segments"][1]["problems"]
    assert (problem["severity"], problem["path"], problem["offset"]) == (
        "damage",
        str(directory / "log.1.0"),
        64,
    )


def test_verify_of_torn_tail_exits_with_0_and_prints_note(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publisher.publish(b"value")
    with (Path(publisher.directory) / "log.0.0").open("ab") as newest:
        newest.write(b"torn")
    result = run_well("log", "verify", publisher.directory)
    assert result.stdout.startswith("note: ")
    assert "4 bytes torn" in result.stdout


# compare


def test_compare_of_identical_copies_exits_with_0(directory: Path) -> None:
    result = run_well("log", "compare", directory, copy(directory))
    assert result.stdout.splitlines()[-1].startswith("no difference in ")
    (found,) = objects(run_well("log", "compare", "--json", directory, directory.parent / "copy"))
    assert found["is_same"] is True
    assert found["differences"] == []
    assert [log["start"] for log in found["logs"]] == [3, 3]
    assert [log["trimmed"] for log in found["logs"]] == [["log.0.0"]] * 2


def test_compare_names_first_difference_and_exits_with_1(directory: Path) -> None:
    other = copy(directory, "other")
    flip(other / "log.2.0", 77)
    result = run("log", "compare", directory, other)
    assert result.exit_code == 1
    assert f"{other} and {directory} differ in log.2.0 at offset 77, position 6: other bytes" in result.stdout
    result = run("log", "compare", "--json", directory, other)
    assert result.exit_code == 1
    ((difference,),) = [found["differences"] for found in objects(result)]
    assert (difference["segment"], difference["offset"], difference["position"]) == ("log.2.0", 77, 6)


def test_compare_of_single_directory_exits_with_2(directory: Path) -> None:
    assert run("log", "compare", directory).exit_code == 2


# All commands


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes())
        for path in directory.iterdir()
    }


@pytest.mark.parametrize(
    "command", [["stat"], ["dump"], ["dump", "--batches"], ["verify"], ["compare", "COPY"]]
)
def test_log_commands_write_nothing_while_publisher_holds_directory(
    directory: Path, command: list[str]
) -> None:
    with rt.Publisher(directory.parents[2], "s", publisher_id="feed", fsync="never") as publisher:
        publisher.publish(b"live")
        publisher.flush()
        arguments = [str(copy(directory)) if word == "COPY" else word for word in command]
        before = snapshot(directory)
        os.chmod(directory, 0o500)
        try:
            run_well("log", *arguments, directory)
        finally:
            os.chmod(directory, 0o700)
        assert snapshot(directory) == before


@pytest.mark.slow
def test_dump_follows_log_until_interrupted(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publisher.publish(b"first")
        publisher.flush()
        command = [sys.executable, "-m", "rt", "log", "dump", "--follow", publisher.directory]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            killer = threading.Timer(300, process.kill)
            killer.start()
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline().endswith("first\n")
            publisher.publish(b"second")
            assert process.stdout.readline().endswith("second\n")
            process.send_signal(2)
            assert process.wait() == 130
            killer.cancel()
            assert process.stderr.read() == ""


def test_unreachable_directory_is_not_reported_as_missing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/var/lib/rt belongs to the node's user. Other users may be unable to read it."""
    missing = run("log", "stat", directory / "none")
    assert missing.exit_code == 2
    assert "does not exist" in missing.output
    stat = os.stat

    def refused(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if path == str(directory):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refused)
    result = run("log", "stat", directory)
    assert result.exit_code == 2
    assert "cannot be reached: Permission denied. Run the command as the user" in " ".join(
        result.output.split()
    )
    monkeypatch.undo()
    loop = directory / "loop"
    loop.symlink_to(loop)
    assert "Too many levels of symbolic links" in run("log", "verify", loop).output
