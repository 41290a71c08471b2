"""Answers of real nodes to an operator, over gRPC."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import rt
from rt.net.rest_client import RestResponse, ask, check
from sequencer.localcluster.nodes import LocalCluster

WAIT_S = 180.0


def told(nodes: LocalCluster, target: str, body: dict[str, Any] | None = None, *, by: str = "") -> Any:
    """Return the answer of `by` (default: any running node). GET without a body, POST with one.

    The nodes may have no leader at this moment, or decide too late, for example after a stall of the machine.
    The asked node may still be opening its log. Then the answer is a retriable error, and the request is
    repeated until it is decided. So `target` must tolerate a repeated request.
    """
    endpoints = [f"127.0.0.1:{nodes.data_ports[name]}" for name in ([by] if by else nodes.running)]
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    tls = nodes.certificate("operator", "op")
    answers: list[RestResponse] = []

    def is_answered() -> bool:
        try:
            answers.append(check(asyncio.run(ask(endpoints, tls, method, target, data))))
        except rt.RtError as error:
            if not error.retriable:
                raise
        return bool(answers)

    nodes.wait(is_answered, f"an answer to {method} {target}", timeout_s=WAIT_S)
    return json.loads(answers[0].body)


def wait_run(nodes: LocalCluster, session: str, run: int, number: int = 0) -> None:
    """Wait until the asked node, which may lag, knows this last run and has merged up to `number`."""

    def is_known() -> bool:
        found = told(nodes, f"/sessions?name={session}")
        return bool(found) and found[-1]["lastRun"] == run and found[-1]["consumed"]["number"] >= number

    nodes.wait(is_known, f"run {run} of {session} to be the last one")


def is_closed(nodes: LocalCluster, session: str) -> bool:
    found = told(nodes, f"/sessions?name={session}")
    return bool(found) and not found[-1]["runs"]
