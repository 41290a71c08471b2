"""The conditions that a cluster must meet after any fault, in one function: `verdict`.

The merged log contains everything of each sender that had to survive, once and in order. Positions are dense.
All nodes run and have the same bytes. The nodes' logs contain only expected lines.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path

from senders import Sender, read_value

import rt
from sequencer.localcluster.nodes import LocalCluster

WAIT_S = 180.0

_LOUD = re.compile(r" level=(error|critical) ")
_HEARTBEAT = re.compile(r" event=child_(hung|answers|started) child=(\w+)")
_LINE = re.compile(r"time=\S+ level=\w+ process=\w+ ")


class Trial:
    """Checks the messages merged and the lines logged since its creation."""

    def __init__(self, nodes: LocalCluster) -> None:
        self.nodes = nodes
        self.senders: list[Sender] = []
        self._position = max(map(nodes.merged_position, nodes.names))
        self._logged = {name: len(_lines(nodes, name)) for name in nodes.names}

    def verdict(self, *, allowed: Collection[str] = (), others: Mapping[str, int] = {}) -> None:
        """Raise `AssertionError` unless all is well; the senders have been closed.

        `allowed` are patterns of lines at level error that this fault explains. `others` is the number of
        messages from other publishers, by session.

        A process that a node reports as hung must answer later: on a busy machine it may be silent for some
        seconds.
        """
        nodes = self.nodes
        assert sorted(nodes.running) == nodes.names, nodes.running
        messages, end = self._take(others)
        nodes.wait_merged(end)
        nodes.check_alive()
        for sender in self.senders:
            check_sender(sender, [each for each in messages if each.session == sender.session])
        comparison = nodes.compare()
        assert comparison.differences == (), comparison.differences
        assert {log.end for log in comparison.logs} == {end}, [log.end for log in comparison.logs]
        nodes.wait(lambda: not self._hung(), "processes that are reported as hung to answer")
        assert not (loud := self.loud([*allowed, " event=child_hung "])), "\n".join(loud)

    def loud(self, allowed: Collection[str] = ()) -> list[str]:
        """Lines of the nodes' logs at level error or worse, or with an unknown format."""
        return [
            f"{name}: {line}"
            for name in self.nodes.names
            for line in self.said(name)
            if _LOUD.search(line) or not _LINE.match(line)
            if not any(re.search(pattern, line) for pattern in allowed)
        ]

    def said(self, name: str) -> list[str]:
        """All lines that a node has logged since this trial was created."""
        return _lines(self.nodes, name)[self._logged[name] :]

    def _hung(self) -> list[tuple[str, str]]:
        """By node: processes that it reported as hung, and that have neither answered nor been started again
        since.
        """
        last = {
            (name, found[2]): found[1]
            for name in self.nodes.names
            for line in self.said(name)
            if (found := _HEARTBEAT.search(line))
        }
        return [process for process, state in last.items() if state == "hung"]

    def _take(self, others: Mapping[str, int]) -> tuple[list[rt.Message], int]:
        """Return all messages merged since the trial was created, and their end.

        Wait for the last message of each publisher. Merged messages are committed, but may not be in this
        node's log yet.
        """
        messages: list[rt.Message] = []
        last = {sender.session: (sender.lives[-1].tag, sender.notes.flushed - 1) for sender in self.senders}
        awaited, lacking = set(last), Counter(others)
        deadline = time.monotonic() + WAIT_S
        path = self.nodes.merged_directory(self.nodes.running[0])
        with rt.LogReader(path, position=self._position, follow=True) as reader:
            while awaited or +lacking:
                self.nodes.check_alive()
                taken = reader.poll(100_000, 1.0)
                lacking.subtract(message.session for message in taken)
                awaited -= {
                    message.session
                    for message in taken
                    if message.session in awaited and read_value(message.value) == last[message.session]
                }
                messages += taken
                assert time.monotonic() < deadline, self._missing(awaited)
            messages += reader.poll(100_000, 0)
            positions = [message.position for message in messages]
            assert positions == list(range(self._position, self._position + len(messages)))
            return messages, reader.position

    def _missing(self, awaited: Collection[str]) -> str:
        lost = [sender for sender in self.senders if sender.session in awaited]
        words = [f"{sender.session}: {sender.notes} {sender.last_words()}" for sender in lost]
        return "\n".join(["not merged:", *words, *map(self.nodes.last_words, self.nodes.names)])


def check_sender(sender: Sender, messages: Sequence[rt.Message]) -> None:
    """Check that everything that had to survive is there once, ordered by incarnation, run and number."""
    got = [read_value(message.value) for message in messages]
    assert [number for _, number in got] == [message.number for message in messages]
    incarnation_of = {life.tag: life.incarnation for life in sender.lives}
    groups = [
        (incarnation, list(group)) for incarnation, group in groupby(got, lambda one: incarnation_of[one[0]])
    ]
    order = [incarnation for incarnation, _ in groups]
    assert order == sorted(set(order)), order
    merged = dict(groups)
    for incarnation in sorted(set(incarnation_of.values())):
        found = merged.get(incarnation, [])
        assert [number for _, number in found] == list(range(len(found))), (sender.session, incarnation)
        lives = [life for life in sender.lives if life.incarnation == incarnation]
        for life in lives:
            assert len(found) >= life.notes.replicated, (sender.session, life.notes, len(found))
        if incarnation == max(order):
            assert len(found) >= lives[-1].notes.flushed, (sender.session, lives[-1].notes, len(found))
        # A run has no range of its own if it ended before its publisher noted anything.
        noted = [life for life in lives if life.notes.flushed or life.notes.first]
        for life, successor in pairwise(noted):
            flushed = range(life.notes.first, min(life.notes.flushed, successor.notes.first))
            assert {found[number][0] for number in flushed} <= {life.tag}, (sender.session, life.notes)
            assert successor.notes.first >= life.notes.flushed, (life.notes, successor.notes)
    assert len(set(got)) == len(got)


def _lines(nodes: LocalCluster, name: str) -> list[str]:
    """Return complete lines: the node may be writing the last one."""
    path = Path(nodes.root, f"{name}.log")
    text = path.read_text(errors="replace") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
