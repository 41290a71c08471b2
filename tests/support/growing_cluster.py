"""A cluster of real nodes whose members change: some form the cluster, an operator adds the others."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rt.errors import RtError
from rt.log.check.compare import compare
from rt.net.rest_client import ask, check
from sequencer.localcluster.nodes import LocalCluster
from sequencer.state.feature_level import LATEST


class GrowingCluster(LocalCluster):
    """`count` nodes. The first `begin` nodes form the cluster. Each other node knows these and itself."""

    def __init__(self, root: Path, count: int, begin: int, *, flags: Sequence[str] = ()) -> None:
        super().__init__(root, count, flags=flags, begin=begin)

    def raft_address(self, name: str) -> str:
        return f"127.0.0.1:{self.raft_ports[name]}"

    def endpoints_of(self, *names: str) -> list[str]:
        return [f"127.0.0.1:{self.data_ports[name]}" for name in names]

    def ask(self, target: str, body: object = None, *, of: Sequence[str] = ()) -> Any:
        """Ask the nodes `of` (default: all running nodes), and return the first answer."""
        endpoints = self.endpoints_of(*(of or self.running))
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        tls = self.certificate("operator", "op")
        answer = asyncio.run(ask(endpoints, tls, method, target, data, connect_timeout_s=1.0))
        return json.loads(check(answer).body)

    def raise_level(self) -> None:
        """Raise the feature level to `LATEST`, once every member has reported that it knows this level."""

        def is_raised() -> bool:
            with suppress(RtError):  # The leader may not have the report of every member yet.
                self.ask("/raise-feature-level", {"level": LATEST})
            return bool(self.ask("/status")["featureLevel"] == LATEST)

        self.wait(is_raised, "the cluster to have the highest feature level")

    def member(self, *words: str, of: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run `rt member`."""
        tls = self.certificate("operator", "op")
        endpoints = ",".join(self.endpoints_of(*(of or self.running)))
        options = ["--endpoints", endpoints, "--ca", tls.ca, "--cert", tls.cert, "--key", tls.key]
        return subprocess.run(
            [Path(sys.executable).with_name("rt"), "member", *words, *map(str, options)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def roles(self, *, of: Sequence[str] = ()) -> dict[str, str]:
        return {one["name"]: one["role"] for one in self.ask("/status", of=of)["members"]}

    def settled(self, *, of: Sequence[str] = ()) -> Any:
        """Return the last finished change of the members. None if there is none, or if no node answers."""
        try:
            return self.ask("/status", of=of)["settledMemberChange"]
        except RtError:
            return None

    def compare_of(self, *names: str) -> list[str]:
        """Return the differences between the merged logs of these nodes."""
        return [*map(str, compare([*map(self.merged_directory, names)]).differences)]
