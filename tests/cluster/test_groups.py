"""A consumer group of real workers on a real cluster: one is killed, one paused beyond its leases."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from faults import WAIT_S, Faults

import rt
from rt.cli.commands.groups import groups
from rt.net.lease_client import LeaseCalls

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "group_worker.py"
TOPICS = [f"group/{number}" for number in range(12)]


class Workers:
    """Workers of one group. They write lines into one file: process, topic, position, value."""

    def __init__(self, faults: Faults, root: Path) -> None:
        self._nodes, self._root = faults.nodes, root
        self._tls = faults.nodes.certificate("subscriber", "workers", lease_groups=["workers"])
        self.out = root / "handled.txt"
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> int:
        command = [sys.executable, EXAMPLE, "--stream", "s", "--pattern", "group/*", "--lease-seconds", "2"]
        command += ["--path", self._root / "copies", "--out", self.out]
        command += ["--endpoints", ",".join(self._nodes.endpoints)]
        command += ["--ca", self._tls.ca, "--cert", self._tls.cert, "--key", self._tls.key]
        process = subprocess.Popen(command)
        self.running[process.pid] = process
        return process.pid

    def lines(self) -> list[tuple[int, str, int, int]]:
        rows = [line.split() for line in self.out.read_text().splitlines()] if self.out.exists() else []
        return [(int(pid), topic, int(position), int(value)) for pid, topic, position, value in rows]

    def have_handled(self, values: range, by: int | None = None) -> bool:
        """Return whether all `values` were handled, some of them by the process `by`."""
        found = [(pid, value) for pid, _, _, value in self.lines() if value in values]
        return {value for _, value in found} == set(values) and (
            by is None or by in {pid for pid, _ in found}
        )

    def kill(self, pid: int) -> None:
        process = self.running.pop(pid)
        process.kill()
        process.wait()

    def end(self) -> list[int]:
        """Send SIGTERM to the workers; return their exit statuses."""
        for process in self.running.values():
            process.terminate()
        ended = [self.running.pop(pid) for pid in list(self.running)]
        return [process.wait() for process in ended]

    def show(self) -> dict[str, Any]:
        """Return the output of `rt groups show` for the group."""
        result = self._operate("show", "--json")
        assert result.exit_code == 0, result.output
        (found,) = map(json.loads, result.stdout.splitlines())
        return dict(found)

    def retire(self) -> None:
        """Delete the positions of the group as an operator, so that no later test finds them."""
        result = self._operate("delete")
        assert result.exit_code == 0 or "no positions of that group" in str(result.exception), result.output

    def _operate(self, command: str, *options: str) -> Result:
        tls = self._nodes.certificate("operator", "op")
        files = ["--ca", str(tls.ca), "--cert", str(tls.cert), "--key", str(tls.key)]
        nodes = ["--endpoints", ",".join(self._nodes.endpoints), *files]
        results: list[Result] = []

        def is_answered() -> bool:
            """Return whether the command has an answer. Without a leader or after a stall it must be
            repeated.
            """
            result = CliRunner().invoke(groups, [command, "workers", *options, *nodes])
            if not (isinstance(result.exception, rt.RtError) and result.exception.retriable):
                results.append(result)
            return bool(results)

        self._nodes.wait(is_answered, f"an answer to rt groups {command}", timeout_s=WAIT_S)
        return results[0]

    def positions(self) -> Mapping[str, int]:
        """Return the positions that the cluster stores for the group."""

        async def read() -> Mapping[str, int]:
            calls = LeaseCalls(self._nodes.endpoints, self._tls)
            try:
                return (await calls.acknowledge({}, timeout_s=WAIT_S)).positions
            finally:
                await calls.close()

        return asyncio.run(read())


@contextmanager
def working(faults: Faults, root: Path) -> Iterator[Workers]:
    workers = Workers(faults, root)
    try:
        yield workers
    finally:
        for pid, process in list(workers.running.items()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                workers.kill(pid)


def test_group_handles_every_message_in_topic_order_over_kill_and_pause_of_members(
    faults: Faults, tmp_path: Path
) -> None:
    nodes = faults.nodes
    tls = nodes.certificate("publisher", "grouped")
    with (
        working(faults, tmp_path) as workers,
        rt.Publisher(
            tmp_path / "out", "s", publisher_id="grouped", endpoints=nodes.endpoints, tls=tls
        ) as publisher,
    ):
        count = 0

        def publish(more: int) -> range:
            nonlocal count
            values = range(count, count + more)
            for value in values:
                publisher.publish(b"%d" % value, topic=TOPICS[value % len(TOPICS)])
            count += more
            return values

        first, second = workers.start(), workers.start()
        while {pid for pid, *_ in workers.lines()} != {first, second}:
            values = publish(60)
            faults.wait(lambda values=values: workers.have_handled(values), "both members to handle messages")

        workers.kill(first)
        values = publish(120)
        faults.wait(lambda: workers.have_handled(values), "the other one to handle all")

        third = workers.start()
        os.kill(second, signal.SIGSTOP)
        values = publish(120)
        faults.wait(lambda: workers.have_handled(values, third), "a new one to handle all")
        os.kill(second, signal.SIGCONT)
        whole = publish(120)
        faults.wait(lambda: workers.have_handled(whole), "the rest")
        faults.wait(lambda: min(workers.positions().values()) > 0, "acknowledgements", poll_s=0.2)
        faults.wait(lambda: len(workers.show()["members"]) == 2, "the members that live", poll_s=0.2)
        assert {one["member"] for one in workers.show()["partitions"]} <= {None, *workers.show()["members"]}
        assert workers.end() == [0, 0], "graceful ends"

        kept = workers.positions()
        assert len(kept) == 16
        fourth = workers.start()
        more = publish(24)
        faults.wait(lambda: workers.have_handled(more, fourth), "the next generation to continue")
        assert workers.end() == [0]
        again = [position for pid, _, position, _ in workers.lines() if pid == fourth]
        assert min(again) >= min(kept.values()) > 0, "positions outlive all members"
        faults.wait(lambda: not workers.show()["members"], "the end of its leases", poll_s=0.2)
        workers.retire()
        faults.wait(lambda: not workers.positions(), "the release on every node", poll_s=0.2)

        lines = workers.lines()
        assert {value for *_, value in lines} == set(range(count))
        for topic in TOPICS:
            firsts = list(dict.fromkeys(value for _, other, _, value in lines if other == topic))
            assert firsts == sorted(firsts), topic
