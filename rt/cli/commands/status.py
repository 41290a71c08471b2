"""`rt status`: the state of a cluster, read from its nodes through their gRPC port."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from rt.cli.endpoints import NodeOptions, ask_nodes, endpoint_options
from rt.cli.formats.cluster_summary import ClusterSummary, NodeAnswer, status_lines, verdict
from rt.cli.formats.console import report, show
from rt.cli.options import FiniteRange, connect_timeout_option, json_option, option
from rt.errors import RtError, Timeout

if TYPE_CHECKING:
    from rt.net.tls import TLS

ASK_S: Final = 5.0
"""Timeout of one request."""
_CLEAR: Final = "\x1b[2J\x1b[H"


@click.command()
@option(
    "--watch",
    type=FiniteRange(min=0.1),
    metavar="SECONDS",
    help="Repeat at this interval until interrupted. Seconds. Default: show the state once.",
)
@json_option
@endpoint_options(
    "operator",
    "gRPC endpoints of the nodes, separated by commas. All of them are asked.",
    is_required=True,
)
@connect_timeout_option("A node that cannot be connected to in this time counts as down.")
def status(watch: float | None, as_json: bool, connect_timeout: float, nodes: NodeOptions) -> None:
    """Show the state of a cluster: alarms, members, merged log, retention, publishers, subscribers.

    Exit status 0 means that the cluster is healthy. Exit status 1 means that a node of --endpoints does not
    answer or that there is a critical alarm; the last line on stderr says which.
    """
    endpoints, tls = nodes.parse()
    if watch is not None:
        _watch(endpoints, tls, watch, connect_timeout, as_json=as_json)
    overview = asyncio.run(read_summary(endpoints, tls, connect_timeout))
    _show(overview, as_json=as_json)
    if overview.problems:
        report(verdict(overview))
        raise click.exceptions.Exit(1)


def _watch(nodes: Sequence[str], tls: TLS | None, seconds: float, connect_s: float, *, as_json: bool) -> None:
    """Show the state again and again, until interrupted."""
    is_screen = sys.stdout.isatty() and not as_json
    while True:
        try:
            overview = asyncio.run(read_summary(nodes, tls, connect_s))
        except RtError as error:
            report(error)
        else:
            if is_screen:
                click.echo(_CLEAR, nl=False)
            _show(overview, as_json=as_json)
        sys.stdout.flush()
        time.sleep(seconds)


def _show(overview: ClusterSummary, *, as_json: bool) -> None:
    show(overview, as_json=as_json, to_object=ClusterSummary.document, to_lines=status_lines)


async def read_summary(nodes: Sequence[str], tls: TLS | None, connect_s: float) -> ClusterSummary:
    """Ask all nodes at the same time. `rt.RtError` if none of them answers."""
    answers = await asyncio.gather(*(_ask(node, tls, connect_s) for node in nodes))
    if not any(one.status for one in answers):
        reasons = "; ".join(f"{one.endpoint}: {one.error}" for one in answers)
        raise RtError(
            "no node answers",
            got=reasons,
            hint="Check that the nodes are running and that the role of the certificate is operator.",
        )
    return ClusterSummary(tuple(answers))


def _next_step(endpoint: str) -> str:
    """What to look at if a node runs and does not answer."""
    host = endpoint.rpartition(":")[0]
    return (
        f"If it runs, one of its processes may hang: `curl http://{host}:8080/readiness` (its health port, "
        "unless its settings name another one) names the process and the commands that help, and so does "
        "`child_hung` in its log."
    )


async def _ask(node: str, tls: TLS | None, connect_s: float) -> NodeAnswer:
    from rt.net.grpc_errors import Unreachable

    get = partial(ask_nodes, [node], tls, connect_s, where=node, timeout_s=ASK_S)
    try:
        status, clients, holds, everywhere = await asyncio.gather(
            get("/status"),
            get("/rt-clients"),
            get("/holds", empty=[]),
            get("/cluster-clients", empty={}),
        )
    except RtError as error:
        if error.hint is None and isinstance(error, Timeout | Unreachable):
            error.hint = _next_step(node)
        return NodeAnswer(node, error=str(error))
    return NodeAnswer(node, status, clients, holds, everywhere)
