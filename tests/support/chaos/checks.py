"""Checks the records of the processes of a chaos run against the guarantees of consensus.

Each run of each node writes two files of lines. Each line is written in one call:

    applied.<run>    restore <index> <checksum>   the state at the start, or after a skip to a snapshot
                     <index> <name> <checksum>    a command that it applied
    acked.<run>      <index> <name>               a command that it proposed, with the index that it got

A name is `<node>.<run>.<thread>.<counter>`; the counter starts at 1. The running checksum covers all commands
up to this one, including their bytes. A last line without its end was written by a killed process.
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
    """What all runs of all nodes did, and the guarantees that they broke. Without commands it proves
    nothing.
    """

    commands: int = 0
    acknowledged: int = 0
    lives: int = 0
    applied: int = 0
    """Number of commands applied by all runs."""
    installs: int = 0
    """Number of skips ahead by a snapshot of the leader."""
    problems: list[str] = field(default_factory=list)

    def found(self, problem: str) -> None:
        """Record a broken guarantee, up to `PROBLEMS_MAX` of them."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)


def check_lives(directories: Mapping[str, Path], *, is_settled: bool = True) -> Verdict:
    """Check the files that every run of every node wrote in its directory.

    If `is_settled`, the last run of every node must have applied everything.
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
    """Check one run against the known sequence, and extend the sequence. Return the last command of the
    run.
    """
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
    """Check that no command is missing or repeated, and that each proposer's commands are in order from 1
    on.
    """
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
