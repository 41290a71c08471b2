"""`rt status`: how a cluster is, asked of its nodes through their gRPC port."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from rt.cli.options import json_option, option
from rt.cli.overview import Overview, Said
from rt.cli.rest import node_options, nodes_of
from rt.cli.status_text import status_lines, verdict
from rt.errors import RtError

if TYPE_CHECKING:
    from rt.net.tls import TLS

ASK_S: Final = 5.0
"""A node that has not answered by then does not."""
_CLEAR: Final = "\x1b[2J\x1b[H"


@click.command()
@option(
    "--watch",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Look again and again, so long apart, until interrupted.",
)
@json_option
@node_options
def status(
    watch: float | None,
    as_json: bool,
    endpoints: str,
    ca: str | None,
    cert: str | None,
    key: str | None,
    insecure: bool,
) -> None:
    """Show how a cluster is: alarms, members, the merged log against its policy, who publishes and reads.

    Every node of --endpoints is asked, and the certificate must be an operator's. Ends with 0 if the cluster
    is healthy, with 1 if it is not (no node answers, one of them does not, or there is a critical alarm) and
    says which.
    """
    nodes, tls = nodes_of(endpoints, ca, cert, key, insecure=insecure)
    if watch is not None:
        _watch(nodes, tls, watch, as_json=as_json)
    overview = asyncio.run(look(nodes, tls))
    _show(overview, as_json=as_json)
    if overview.problems:
        click.echo(f"rt: {verdict(overview)}", err=True)
        raise click.exceptions.Exit(1)


def _watch(nodes: Sequence[str], tls: TLS | None, seconds: float, *, as_json: bool) -> None:
    """Show it for ever."""
    is_screen = sys.stdout.isatty() and not as_json
    while True:
        try:
            overview = asyncio.run(look(nodes, tls))
        except RtError as error:
            click.echo(f"rt: {error}", err=True)
        else:
            if is_screen:
                click.echo(_CLEAR, nl=False)
            _show(overview, as_json=as_json)
        sys.stdout.flush()
        time.sleep(seconds)


def _show(overview: Overview, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(overview.document()))
        return
    for line in status_lines(overview):
        click.echo(line)


async def look(nodes: Sequence[str], tls: TLS | None) -> Overview:
    """What the nodes say, asked all at once; raises why none of them answers."""
    said = await asyncio.gather(*(_ask(node, tls) for node in nodes))
    if not any(one.status for one in said):
        told = "; ".join(f"{one.endpoint}: {one.error}" for one in said)
        raise RtError(
            "no node answers", got=told, hint="Are they running, and is it an operator's certificate?"
        )
    return Overview(tuple(said))


async def _ask(node: str, tls: TLS | None) -> Said:
    try:
        status, clients, holds = await asyncio.gather(
            _get(node, tls, "/status"), _get(node, tls, "/rt-clients"), _get(node, tls, "/holds", empty=[])
        )
    except RtError as error:
        return Said(node, error=str(error))
    return Said(node, status, clients, holds)


async def _get(node: str, tls: TLS | None, target: str, *, empty: Any = None) -> Any:
    """What a node answers; `empty` (if it is given) where it can say nothing yet."""
    from rt.net.rest import call, check

    answer = await call(node, tls, "GET", target, timeout_s=ASK_S)
    if answer.status == 503 and empty is not None:
        return empty
    return json.loads(check(answer, where=node).body)
