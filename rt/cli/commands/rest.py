"""`rt rest`: send a REST request to the nodes through their gRPC port."""

from __future__ import annotations

import asyncio
import json
import sys

import click

from rt.cli.endpoints import NodeOptions, endpoint_options
from rt.cli.options import connect_timeout_option, option


@click.command()
@click.argument("target", metavar="TARGET")
@option(
    "--data", metavar="JSON", help="JSON body of a POST request. Default: none, and the request is a GET."
)
@endpoint_options(
    "operator",
    "gRPC endpoints of the nodes, separated by commas. They are asked in turn until one answers.",
    is_required=True,
    cert_help="PEM file of the client certificate.",
)
@connect_timeout_option("A node that cannot be connected to in this time is left for the next one.")
def rest(target: str, data: str | None, connect_timeout: float, nodes: NodeOptions) -> None:
    """Send a REST request for TARGET, a path with its query such as /status, and write the answer.

    The request goes through the gRPC port. The role in the certificate decides what it may do, as on the
    REST port. A POST is sent to the next node only if the one before could not be reached.
    """
    from rt.net.rest_client import ask, check, error_in

    endpoints, tls = nodes.parse()
    path = _checked_text(target if target.startswith("/") else f"/{target}", "TARGET")
    method, body = ("GET", None) if data is None else ("POST", _checked_json(data))
    answer = asyncio.run(ask(endpoints, tls, method, path, body, connect_timeout_s=connect_timeout))
    if error_in(answer) is None:
        sys.stdout.buffer.write(answer.body)
        sys.stdout.buffer.flush()
    check(answer)


def _checked_json(data: str) -> bytes:
    try:
        json.loads(_checked_text(data, "--data"))
    except RecursionError:
        raise click.UsageError("--data is not valid JSON: nested too deep") from None
    except ValueError as error:
        raise click.UsageError(f"--data is not valid JSON: {error}") from None
    return data.encode()


def _checked_text(text: str, what: str) -> str:
    """An argument whose bytes are not UTF-8 has surrogates, which cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.UsageError(f"{what} is not valid UTF-8, from character {error.start} on") from None
    return text
