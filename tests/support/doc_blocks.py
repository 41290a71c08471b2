"""The code blocks of README and docs: find them, check them, and run a page as a reader would.

A fence has a language, followed by marks: `cluster` for a block that needs nodes, `install` for a block that
installs packages. The `python` and `console` blocks of a page run in order, in one directory and one
namespace.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from rt.cli.main import cli

ROOT: Final = Path(__file__).parents[2]
MARKS: Final = frozenset({"cluster", "install"})
SHELL: Final = frozenset({"console", "sh", "bash", "shell"})
RUNNABLE: Final = frozenset(
    {"rt", "python", "printf", "echo", "cat", "ls", "mkdir", "cp", "mv", "head", "tail", "wc", "diff"}
)
"""The programs that a test may start. A block with another program, such as helm, is checked but not run."""

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+) *(?P<info>[^`\n]*)$")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    """Line of the opening fence, from 1."""
    language: str
    marks: frozenset[str]
    text: str

    @property
    def where(self) -> str:
        """Page and line, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def needs_cluster(self) -> bool:
        """Whether it needs nodes."""
        return "cluster" in self.marks

    def commands(self) -> list[str]:
        """Return the commands of a shell block without their output. Continued lines are joined."""
        lines = re.sub(r"\\\n *(?:> )?", " ", self.text).splitlines()
        if not any(line.startswith("$ ") for line in lines):
            lines = [f"$ {line}" for line in lines if line.strip() and not line.startswith("#")]
        found: list[str] = []
        for line in lines:
            if line.startswith("$ "):
                found.append(line.removeprefix("$ "))
            elif found and shell_problem(found[-1]):
                found[-1] += f"\n{line}"
        return found

    def is_runnable(self) -> bool:
        """Whether a test may run it on any machine."""
        if self.language == "python":
            return True
        programs = {words[0] for command in self.commands() for words in simple_commands(command)}
        return self.language == "console" and "install" not in self.marks and programs <= RUNNABLE


def pages() -> list[str]:
    """All pages with code, as paths below the root."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "helm" / "README.md"]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    return list(_blocks(page, (ROOT / page).read_text(encoding="utf-8")))


def _blocks(page: str, text: str) -> Iterator[Block]:
    opened: tuple[int, re.Match[str]] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if opened is None:
            if found is not None:
                opened, lines = (number, found), []
        elif found is not None and not found["info"] and found["ticks"].startswith(opened[1]["ticks"]):
            words = opened[1]["info"].split()
            body = textwrap.dedent("\n".join(lines)) + "\n"
            yield Block(page, opened[0], words[0] if words else "", frozenset(words[1:]), body)
            opened = None
        else:
            lines.append(line)
    assert opened is None, f"{page}:{opened and opened[0]}: the block is not closed"


def shell_problem(command: str) -> str:
    """Return the error message of bash for the syntax of a command; empty if the syntax is correct."""
    return subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True, check=False).stderr


def simple_commands(command: str) -> Iterator[list[str]]:
    """Yield the words of each program call in a shell line, without leading assignments."""
    lexer = shlex.shlex(command.replace("$(", "( ").replace("\n", ";"), posix=True, punctuation_chars="();|&")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();|&"):
            if words:
                yield words
            words = []
        elif words or not _ASSIGNMENT.fullmatch(word):
            words.append(word)


def check_rt_command(words: list[str]) -> None:
    """Raise `click.UsageError` if an rt command line has a command or an option that does not exist.

    Values are not checked, because they may be placeholders for the reader's own values.
    """
    words = [word if word not in {"…", "..."} else "x" for word in words]
    for index, word in enumerate(words):
        if re.fullmatch(r"\d*[<>].*", word):
            words = words[:index]
            break
    command: click.Command = cli
    context = click.Context(cli, info_name="rt")
    rest = words[1:]
    while isinstance(command, click.Group):
        rest = command.make_parser(context).parse_args(rest)[1] if rest and rest[0].startswith("-") else rest
        if not rest:
            return
        found = command.get_command(context, rest[0])
        if found is None:
            raise click.UsageError(f"there is no command {rest[0]!r} of {context.command_path!r}")
        command, context = found, click.Context(found, parent=context, info_name=rest[0])
        rest = rest[1:]
    *_, extra, _ = (None, *command.make_parser(context).parse_args(rest)[1:])
    if extra and not any(isinstance(one, click.Argument) for one in command.params):
        raise click.UsageError(f"{context.command_path} takes no arguments: {extra}")


def rt_commands(command: str) -> Iterator[list[str]]:
    """Yield the rt command lines in a shell line, also after words such as `exec`, `sudo` or `--`."""
    for words in simple_commands(command):
        for index, word in enumerate(words):
            is_program = index == 0 or words[index - 1] in {"--", "exec", "sudo", "rt", "time"}
            if is_program and (word == "rt" or word.endswith("/bin/rt")):
                yield words[index:]
                break


RUNNER: Final = """
import json, subprocess, sys, time

blocks = json.loads(sys.stdin.read())
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
shell = subprocess.Popen(["bash"], text=True, **pipes)


def run(command):
    shell.stdin.write("{ " + command + "\\n} </dev/null\\necho ::status $?\\n")
    shell.stdin.flush()
    for line in shell.stdout:
        before, mark, status = line.partition("::status ")
        print("|", before, end="" if before.endswith("\\n") else "\\n")
        if mark:
            return int(status)
    raise SystemExit("the shell has ended")


names = {"__name__": "__main__"}
for where, language, content in blocks:
    print("--", where, flush=True)
    if language == "python":
        exec(compile(content, where, "exec"), names)
        continue
    for command in content:
        print("$", command, flush=True)
        if command.startswith(("rt node --config", "rt dev")):
            log = open("nodes.log", "a+")
            started = subprocess.Popen(["bash", "-c", "exec " + command], stdout=log, stderr=log)
            while command.startswith("rt dev"):
                has_ended = started.poll() is not None
                log.seek(0)
                said = log.read()
                if "Ctrl-C" in said:
                    break
                if has_ended:
                    raise SystemExit(f"{where}: {command}: {said}")
                time.sleep(0.2)
            continue
        deadline = time.monotonic() + (60 if command.startswith("rt status") else 0)
        while (status := run(command)) and time.monotonic() < deadline:
            time.sleep(0.2)
        if status:
            raise SystemExit(f"{where}: {command}: exit status {status}")
"""
"""Runs blocks from stdin, `[where, language, text or commands]` each. Nodes run in the background."""
