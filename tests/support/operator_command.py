"""Runs an operator's command against the REST views of a node, over loopback mTLS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import click
from click.testing import CliRunner, Result
from rest_node import Served, serving

from rt.net.grpc_channel import serve
from sequencer.rest.http.dispatcher import Dispatcher
from sequencer.rest.http.tunnel import TUNNEL_ROLES, Tunnel

_FILES = {"ca": "ca.crt", "cert": "op.crt", "key": "op.key"}


def run_command(
    command: click.Command, *arguments: str, pki: Path, root: Path, prepare: Callable[[Served], None]
) -> tuple[Result, Served]:
    """Run the command. Return its result and the node.

    `prepare` changes the data that the node serves. `pki` comes from `receiving_node.make_pki`.
    """

    async def main() -> tuple[Result, Served]:
        async with serving(pki, root) as served:
            prepare(served)
            answering = served.rest.answering["rest"]
            assert isinstance(answering, Dispatcher)
            tunnel = Tunnel(lambda: answering)
            server = await serve("127.0.0.1:0", [tunnel.register], roles=TUNNEL_ROLES, tls=served.tls)
            try:
                files = [f"--{name}={pki / file}" for name, file in _FILES.items()]
                line = [*arguments, f"--endpoints=localhost:{server.port}", *files]
                return await asyncio.to_thread(CliRunner().invoke, command, line), served
            finally:
                await server.stop()

    return asyncio.run(main())
