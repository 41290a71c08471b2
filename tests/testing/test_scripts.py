"""Tests the script runner: it checks every answer, detects every difference, and rewrites only answers."""

from pathlib import Path

import pytest
from scripts import Case, replay

SCRIPT = """\
# Sums, one number a line.

sum
1
2
----
3

# Prose in between.
say words="two words" count=3
----
two words
two words
two words
"""


def answer(case: Case) -> str:
    if case.command == "sum":
        return str(sum(map(int, case.lines)))
    return "\n".join([case.arguments["words"]] * case.number("count"))


def script(path: Path, text: str) -> Path:
    file = path / "script.txt"
    file.write_text(text)
    return file


def test_script_with_correct_answers_passes(tmp_path: Path) -> None:
    replay(script(tmp_path, SCRIPT), answer)


def test_script_with_trailing_empty_line_passes(tmp_path: Path) -> None:
    replay(script(tmp_path, SCRIPT + "\n"), answer)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("3\n\n", "4\n\n"),
        ("3\n\n", "\n"),
        ("2\n----", "3\n----"),
        ("count=3", "count=2"),
        ("3\n\n", "3\nx\n\n"),
    ],
)
def test_script_with_any_difference_fails(tmp_path: Path, old: str, new: str) -> None:
    file = script(tmp_path, SCRIPT.replace(old, new))
    with pytest.raises(AssertionError, match="the script says otherwise"):
        replay(file, answer)


def test_rewrite_changes_only_answers(tmp_path: Path) -> None:
    file = script(tmp_path, SCRIPT.replace("3\n\n", "4\n5\n\n").replace("two words\n", "", 2))
    replay(file, answer, rewrite=True)
    assert file.read_text() == SCRIPT


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# Only prose.\n", "no case"),
        ("sum\n1\n", "without ----"),
        ("sum\n1\n\n2\n----\n3\n", "without ----"),
        ("sum\n1\n----\n1\nsum\n2\n----\n2\n", "no empty line before"),
        ('say words="" count=2\n----\n\n', "empty"),
    ],
)
def test_script_without_cases_or_with_malformed_case_is_rejected(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        replay(script(tmp_path, text), answer)


def test_error_reports_script_path_and_line_of_its_case(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        replay(script(tmp_path, SCRIPT.replace("2\n----", "x\n----")), answer)
    assert caught.value.__notes__ == [f"in the case at {tmp_path / 'script.txt'}:3"]
