"""Serves the metrics of a host's streams over plain HTTP. They name no stream and no event.

`GET /metrics` is for Prometheus and `rt streams hosts`; any other path is 404. Binds to the loopback by
default.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from rt.streams.provider import StreamProvider

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@contextlib.asynccontextmanager
async def serve_metrics(
    providers: Sequence[StreamProvider], *, port: int, address: str = "127.0.0.1"
) -> AsyncIterator[None]:
    """Serve until the context ends. `OSError` if the port is in use."""

    async def metrics(_: web.Request) -> web.Response:
        body = "".join(provider.metrics() for provider in providers)
        return web.Response(body=body.encode(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
        yield
    finally:
        await runner.cleanup()
