"""What the processes of a chaos run wrote down, held against what consensus promises.

Each life of each node leaves two files of lines, each line written at once and whole:

    applied.<life>   restore <index> <chain>           the state it began with, or skipped ahead to
                     <index> <name> <chain>            a command it applied
    acked.<life>     <index> <name>                    a command it proposed and was told the index of

A name is `<node>.<life>.<thread>.<counter>`, the counter from 1; the chain is a running hash of all commands
up to there, their bytes included. A last line without its end is of a killed writer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NO_CHAIN = "0" * 32
PROBLEMS_MAX = 50


@dataclass(slots=True)
class Verdict:
    """What all lives together did, and the promises they broke; a run without commands proves nothing."""

    commands: int = 0
    acknowledged: int = 0
    lives: int = 0
    applied: int = 0
    """Commands applied, over all lives."""
    installs: int = 0
    """Skips ahead, by a snapshot of the leader."""
    problems: list[str] = field(default_factory=list)

    def found(self, problem: str) -> None:
        """Note a broken promise; the first ones are enough."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)


def check_lives(directories: Mapping[str, Path], *, is_settled: bool = True) -> Verdict:
    """Check what every life of every node wrote in its directory.

    With `is_settled`, the last life of every node must have applied everything.
    """
    verdict = Verdict()
    sequence: dict[int, tuple[str, str]] = {}
    restored: list[tuple[str, int, str]] = []
    ends: dict[str, int] = {}
    for node, directory in sorted(directories.items()):
        for life in _lives(directory):
            where = f"{node}, life {life}"
            ends[node] = _check_life(where, directory / f"applied.{life}", sequence, restored, verdict)
    last = max([*sequence, *(index for _, index, _ in restored)], default=0)
    _check_sequence(sequence, last, verdict)
    for where, index, chain in restored:
        if chain != (sequence[index][1] if index in sequence else NO_CHAIN):
            verdict.found(f"{where}: restored to command {index} with another state than was applied")
    for node, directory in sorted(directories.items()):
        for life in _lives(directory):
            _check_acknowledged(f"{node}, life {life}", directory / f"acked.{life}", sequence, verdict)
        if is_settled and ends.get(node) != last:
            verdict.found(f"{node} ended at command {ends.get(node)}, not {last}")
    return verdict


def _lives(directory: Path) -> Sequence[int]:
    return sorted(int(path.suffix[1:]) for path in directory.glob("applied.*"))


def _lines(path: Path) -> Iterator[list[str]]:
    if path.exists():
        with path.open(encoding="ascii") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line.split()


def _check_life(
    life: str,
    path: Path,
    sequence: dict[int, tuple[str, str]],
    restored: list[tuple[str, int, str]],
    verdict: Verdict,
) -> int:
    """One life against the sequence so far, which it may lengthen; the last command it knew."""
    verdict.lives += 1
    at: int | None = None
    for first, second, chain in _lines(path):
        if first == "restore":
            index = int(second)
            restored.append((life, index, chain))
            verdict.installs += at is not None and index > at
            if at is not None and index < at:
                verdict.found(f"{life}: rolled back from command {at} to {index}")
            at = index
            continue
        index = int(first)
        verdict.applied += 1
        if at is None or index != at + 1:
            verdict.found(f"{life}: applied command {index} behind {at}")
        at = index
        known = sequence.setdefault(index, (second, chain))
        if known != (second, chain):
            verdict.found(f"{life}: command {index} is {second} ({chain}), elsewhere {known[0]} ({known[1]})")
    return at or 0


def _check_sequence(sequence: Mapping[int, tuple[str, str]], last: int, verdict: Verdict) -> None:
    """Without a hole, no command twice, and of each proposer all up to some command in their order."""
    if missing := last - len(sequence):
        hole = next(index for index in range(1, last + 1) if index not in sequence)
        verdict.found(f"{missing} commands were never applied anywhere, the first is {hole}")
    verdict.commands = len(sequence)
    counts: Counter[str] = Counter()
    for index in sorted(sequence):
        name = sequence[index][0]
        proposer, _, counter = name.rpartition(".")
        counts[proposer] += 1
        if counts[proposer] != int(counter):
            verdict.found(f"command {index} is {name}, not number {counts[proposer]} of {proposer}")
            counts[proposer] = int(counter)


def _check_acknowledged(
    life: str, path: Path, sequence: Mapping[int, tuple[str, str]], verdict: Verdict
) -> None:
    seen: set[str] = set()
    for index, name in _lines(path):
        verdict.acknowledged += 1
        known = sequence.get(int(index), ("nothing", ""))[0]
        if known != name:
            verdict.found(f"{life}: {name} was acknowledged as command {index}, which is {known}")
        if name in seen:
            verdict.found(f"{life}: {name} was acknowledged twice")
        seen.add(name)
