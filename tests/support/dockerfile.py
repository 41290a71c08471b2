"""Parses a Dockerfile, stage by stage. Knows the instructions that our Dockerfiles use; others are errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

KNOWN: Final = frozenset(
    {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "LABEL", "USER", "VOLUME", "EXPOSE"}
    | {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
)


@dataclass
class Stage:
    """The instructions from one FROM to the next."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        """Return the arguments of each instruction `word`."""
        return [rest for each, rest in self.steps if each == word]

    def one(self, word: str) -> str:
        """Return the arguments of the only instruction `word`."""
        (found,) = self.of(word)
        return found

    def command(self, word: str) -> list[str]:
        """Return the JSON list of an ENTRYPOINT or CMD."""
        found: list[str] = json.loads(self.one(word))
        return found


def read_dockerfile(path: Path) -> tuple[dict[str, str], list[Stage]]:
    """Return the arguments before the first stage, and the stages."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in _lines(path.read_text()):
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word not in KNOWN:
            raise ValueError(f"{path}: {line}")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], base), name))
        elif not stages:
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            stages[-1].steps.append((word, rest))
    return arguments, stages


def _lines(text: str) -> Iterator[str]:
    """Yield the lines without comments and empty lines. Continued lines are joined."""
    kept = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(kept))
    return iter(joined.splitlines())
