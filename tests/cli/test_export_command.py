"""`rt export` without Spark: the status of a target, invalid input, and errors of Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from merged_logs import Feeds
from pyspark.errors import PySparkException

import rt
from rt.cli.main import cli
from rt.cli.spark.errors import spark_errors
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.spark.export.filesystem import LocalFilesystem
from rt.spark.export.target import ExportTarget


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


def test_status_of_target_is_printed_without_spark(tmp_path: Path) -> None:
    assert run(tmp_path, "--status").stdout == "nothing is exported yet\n"
    assert json.loads(run(tmp_path, "--status", "--json").stdout) is None
    target = ExportTarget(LocalFilesystem(str(tmp_path)))
    target.open()
    target.commit(100, 1100, rows=990, log_end=5000, time_ns=1_700_000_000_123_000_000, stream="trades")

    assert run(tmp_path, "--status").stdout == (
        "exported up to position 1,100: 990 messages from 100 on (10 are lost), 0 files, "
        "3,900 messages behind at 2023-11-14T22:13:20Z\n"
    )
    assert json.loads(run(f"file://{tmp_path}", "--status", "--json").stdout) == {
        "start": 100,
        "end": 1100,
        "rows": 990,
        "log_end": 5000,
        "stream": "trades",
        "epoch": 0,
        "files": 0,
        "lag": 3900,
        "time": "2023-11-14T22:13:20.123Z",
        "is_moved": True,
    }


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--status", "--stream", "s"], 2, "--status takes only TARGET"),
        (["--path", ".", "--conf", "x=1"], 2, "give NAME=VALUE with a NAME that starts with spark."),
        (["--path", ".", "--conf", "spark.x"], 2, "give NAME=VALUE with a NAME that starts with spark."),
        ([], 2, "neither path nor endpoints is given"),
        (["--path", ".", "--endpoints", "n:1"], 2, "--path excludes --endpoints"),
        (["--endpoints", "n:1", "--stream", "s"], 2, "--endpoints needs --ca, --cert and --key"),
        (["--path", "/none"], 2, "does not exist"),
    ],
)
def test_invalid_options_exit_with_2_and_create_no_target(
    tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    found = run(tmp_path / "target", *arguments)
    assert (found.exit_code, words in found.stderr) == (status, True), found.output
    assert not (tmp_path / "target").exists()


def test_export_from_nodes_rejects_operator_certificate(tmp_path: Path) -> None:
    init_ca(tmp_path)
    cert, key = issue(tmp_path, Identity("s", "operator", "op"))[1:]
    files = ("--ca", tmp_path / "ca.crt", "--cert", cert, "--key", key)
    found = run(tmp_path / "target", "--endpoints", "127.0.0.1:1", "--stream", "s", *files)
    assert found.exit_code == 1
    assert "the role of the certificate cannot hold messages back" in found.stderr


def test_target_that_is_a_file_is_rejected_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no Java"))
    Feeds(tmp_path).close()
    (tmp_path / "target").touch()
    found = run(tmp_path / "target", "--path", tmp_path / "merged", "--once")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.startswith("rt: this path cannot be used, while listing a directory")
    assert f"{tmp_path}/target is not a directory." in found.stderr


def test_spark_start_failure_is_reported_in_one_line_with_hint(tmp_path: Path) -> None:
    Feeds(tmp_path).close()
    program = "import sys; from rt.cli.main import main; sys.exit(main())"
    arguments = ["export", tmp_path / "target", "--path", tmp_path / "merged", "--master", "local[1]"]
    found = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
    )
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    last = found.stderr.splitlines()[-1]
    assert last.startswith("rt: Spark does not start: got [JAVA_GATEWAY_EXITED]")
    assert "It needs Java 17 or newer: set JAVA_HOME." in last


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "failed\n\tat x\nCaused by: one\n\tat y\nCaused by: java.io.IOException: No space.\n",
            "java.io.IOException: No space. Try again.",
        ),
        (
            "failed\nCaused by: thrown from the Python worker: rt.errors.Gap: 5 are missing\nCaused by: one",
            "rt.errors.Gap: 5 are missing. Try again.",
        ),
        ("Traceback\n  x\nKeyError: 'a'\nmore", "KeyError: 'a'. Try again."),
        ("[GONE] It is gone.\nat x", "[GONE] It is gone. Try again."),
    ],
)
def test_spark_error_is_reported_with_its_cause(text: str, cause: str) -> None:
    with pytest.raises(rt.RtError) as raised, spark_errors("it failed", "target", "Try again."):
        raise PySparkException(text)
    assert str(raised.value) == f"it failed (at target): got {cause}"
    with pytest.raises(KeyError), spark_errors("it failed", None, ""):
        raise KeyError
