"""Scripts of decisions: tables of cases that a reader can check and `pytest --rewrite` can fill in.

    # Prose: why the cases below have these answers.
    command name=value name="several words"
    lines of input, if there are any
    ----
    the answer of the code, up to the next empty line

A test passes a function that turns a `Case` into its answer. The script passes if the file stays the same
when every answer is written again. A failure shows a diff.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a script."""

    command: str
    arguments: dict[str, str]
    lines: tuple[str, ...]

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number from the arguments. Without `default`, the argument must exist."""
        return int(self.arguments[name]) if default is None else int(self.arguments.get(name, default))


Handler: TypeAlias = Callable[[Case], str]


def replay(path: Path, answer: Handler, *, rewrite: bool = False) -> None:
    """Ask `answer` about each case of the script at `path`. Raise `AssertionError` if an answer differs."""
    old = path.read_text()
    new = "".join(_answered(old, path, answer))
    if rewrite:
        path.write_text(new)
        return
    if new != old:
        diff = difflib.unified_diff(
            old.splitlines(), new.splitlines(), f"{path} as it is", "as the code answers", lineterm=""
        )
        raise AssertionError("\n".join(["the script says otherwise (pytest --rewrite changes it):", *diff]))


def _answered(text: str, path: Path, answer: Handler) -> Iterator[str]:
    lines = iter(enumerate(text.splitlines(keepends=True), 1))
    cases = 0
    for place, line in lines:
        if not line.strip() or line.startswith("#"):
            yield line
            continue
        question = [line]
        for _, more in lines:
            if more.strip() == "----":
                break
            assert more.strip(), f"{path}:{place}: a case without ----"
            question.append(more)
        else:
            raise AssertionError(f"{path}:{place}: a case without ----")
        yield from question
        yield "----\n"
        yield _answer(question, f"{path}:{place}", answer)
        cases += 1
        for below, old in lines:
            if not old.strip():
                yield "\n"
                break
            assert old.strip() != "----", f"{path}:{below}: no empty line before this case"
    assert cases, f"{path}: no case in it"


def _answer(question: list[str], where: str, answer: Handler) -> str:
    command, *words = shlex.split(question[0])
    arguments = dict(word.split("=", 1) for word in words)
    try:
        text = answer(Case(command, arguments, tuple(line.rstrip("\n") for line in question[1:])))
    except Exception as error:
        error.add_note(f"in the case at {where}")
        raise
    said = [line.rstrip() for line in text.splitlines()]
    assert said, f"{where}: an empty answer"
    assert all(said), f"{where}: an empty line would end the answer"
    return "\n".join(said) + "\n"
