"""The latest report of each node, as one leader received them. Only the consensus thread calls it.

Invariant: a report that does not follow the one before it is ignored, and a full report requested.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median_low
from typing import Final

from archiver.policy import DiskUse
from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.retention_planner import NodeUsage

ASK_AGAIN_NS: Final = 10**9
"""When to request a full report again: the request may be lost."""
FRESH_NS: Final = 3 * 10**9
"""How long a clock in a report counts."""


class NodeReport:
    def __init__(self, boot: bytes) -> None:
        self.boot = boot
        self.sequence = -1
        self.joins = 0
        """The tracker has everything that was durable on the node when this number of disks had joined."""
        self.is_asked = False
        """Whether a full report was requested. Until the node sends it, some of its reports are missing."""
        self.asked_ns = 0
        self.merged = pb.MergedReport()
        self.clock_ns = 0
        self.disk = DiskUse(0, 0)
        self.heard_ns = 0


class NodeReports:
    def __init__(self, ask_again: Callable[[str], None], now_ns: Callable[[], int]) -> None:
        """`ask_again` requests a full report of a node. `now_ns` is a monotonic clock."""
        self._ask_again, self._now_ns = ask_again, now_ns
        self._nodes: dict[str, NodeReport] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def accept(self, name: str, report: pb.Report) -> NodeReport | None:
        """Record the node's clock and disk; None if the report does not follow the one before it."""
        node = self._nodes.get(name)
        if report.is_full:
            node = self._nodes[name] = NodeReport(report.boot)
        elif node is None or node.boot != report.boot or report.sequence != node.sequence + 1:
            self._ask_again(name)
            return None
        node.sequence = report.sequence
        node.clock_ns, node.heard_ns = report.clock_ns, self._now_ns()
        node.disk = DiskUse(report.disk_bytes, report.disk_free_bytes)
        if node.is_asked and node.heard_ns - node.asked_ns >= ASK_AGAIN_NS:
            self.request_full(name)
        return node

    def request_full(self, name: str) -> None:
        """Request a full report: something in this one cannot be used."""
        node = self._nodes[name]
        node.is_asked, node.asked_ns = True, self._now_ns()
        self._ask_again(name)

    def forget_disk(self, name: str) -> None:
        """The node has a new disk: its reports were of the previous one."""
        if name in self._nodes:
            self._nodes[name].joins = 0
            self.request_full(name)

    @property
    def joins(self) -> dict[str, int]:
        """By node: how many disks had joined at its last complete report."""
        return {name: node.joins for name, node in self._nodes.items()}

    @property
    def merged(self) -> dict[str, int]:
        """By node: the last instruction that it has merged durably."""
        return {name: node.merged.instruction for name, node in self._nodes.items()}

    def heard_since(self, time_ns: int) -> list[str]:
        return [name for name, node in self._nodes.items() if node.heard_ns > time_ns]

    def usage(self) -> list[NodeUsage]:
        """The disk usage and clocks of nodes that reported a short time ago. Each clock is advanced by the
        time since it was read.
        """
        now_ns = self._now_ns()
        ages = ((node, now_ns - node.heard_ns) for node in self._nodes.values())
        return [NodeUsage(node.clock_ns + age_ns, node.disk) for node, age_ns in ages if age_ns < FRESH_NS]

    def clock_ns(self) -> int:
        """The median of the nodes' clocks."""
        clocks = [one.clock_ns for one in self.usage()]
        return median_low(clocks) if clocks else 0

    def count_near(self, instruction: int, total_bytes: int) -> int:
        """The number of nodes that have merged durably beyond this instruction and this size."""
        return sum(
            node.merged.bytes > total_bytes and node.merged.instruction > instruction
            for node in self._nodes.values()
        )
