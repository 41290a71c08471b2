"""`rt query run` without Spark rejects invalid job files and options before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rt.cli.main import cli

KEYED = """
from rt.query import Source, operators as ops
from rt.query.spark import SparkJob

query = Source("in").pipe(ops.group_by(lambda message: message.topic), ops.{after})
job = SparkJob(query, source={{"path": "/none"}})
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["query", "run", *map(str, arguments)])


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("", 2, "the file must set the variable job to a SparkJob"),
        ("job = 5", 2, "got int"),
        (KEYED.format(after="switch_latest()"), 1, "switch_map cannot run on Spark"),
        ("job = (", 1, "job.py, line 1): got SyntaxError: '(' was never closed"),
        ("import nothere", 1, "job.py, line 1): got ModuleNotFoundError: No module named 'nothere'"),
        ("job = 1\nint('x')", 1, "job.py, line 2): got ValueError: invalid literal"),
    ],
)
def test_file_without_valid_spark_job_is_rejected(tmp_path: Path, text: str, status: int, words: str) -> None:
    path = tmp_path / "job.py"
    path.write_text(text)
    found = run("--spark", path)
    assert (found.exit_code, words in found.stderr) == (status, True), found.stderr


def test_invalid_arguments_exit_with_2(tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    path.write_text(KEYED.format(after="merge_all()"))
    for arguments, words in (
        ([path], "Give --spark."),
        (["--spark", path], "not a Python file"),
        (["--spark", path, "--conf", "x=1"], "give NAME=VALUE with a NAME that starts with spark."),
        (["--spark", tmp_path / "none.py"], "does not exist"),
    ):
        found = run(*arguments)
        assert (found.exit_code, words in found.stderr) == (2, True), found.stderr
