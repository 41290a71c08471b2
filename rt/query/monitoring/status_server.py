"""Serves the status of engines over plain HTTP, from a thread of its own.

    GET /metrics    for Prometheus
    GET /queries    JSON, for `rt queries`: {"engines": [{"name", "status", "dead_letters"}, …]}

Binds to the loopback by default. `/queries` shows the texts of errors. It also shows the values of dead
letters if the program asks for them. Any client that reaches the port can read them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol

from msgspec import to_builtins
from msgspec.structs import replace

from rt.exposition import CONTENT_TYPE, Metric, exposition
from rt.query.monitoring.dead_letters import DeadLetter
from rt.query.monitoring.metrics import metrics_of
from rt.query.monitoring.status import EngineStatus

logger = logging.getLogger("rt.query")

_TIMEOUT_S: Final = 10.0


class MonitoredEngine(Protocol):
    """A `QueryEngine`."""

    def status(self) -> EngineStatus: ...

    @property
    def dead_letters(self) -> list[DeadLetter]: ...


@contextlib.contextmanager
def serve_status(
    engines: Mapping[str, MonitoredEngine],
    *,
    port: int,
    address: str = "127.0.0.1",
    per_query: bool = True,
    show_values: bool = False,
) -> Iterator[int]:
    """Serve until the context ends. Returns the port; port 0 chooses one. `OSError` if the port is in use.

    `engines`: the engines by name; the names label the metrics. The mapping may change while it is served.
    `per_query=False` leaves out the metrics that name queries, for engines with thousands of queries.
    `show_values`: show the values of dead letters in `/queries`.
    """

    def metrics() -> str:
        each = [
            list(metrics_of(name, engine.status(), per_query=per_query))
            for name, engine in list(engines.items())
        ]
        return exposition(_merged(each))

    def queries() -> str:
        return json.dumps(
            {"engines": [_row(name, each, show_values) for name, each in list(engines.items())]}
        )

    pages = {"/metrics": (CONTENT_TYPE, metrics), "/queries": ("application/json", queries)}
    server = _Server((address, port), pages)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="rt-query-status", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _merged(engines: list[list[Metric]]) -> Iterator[Metric]:
    """One metric of each name with the samples of all engines, as the text format requires."""
    for same in zip(*engines, strict=True):
        samples = {key: value for each in same for key, value in each.samples.items()}
        yield replace(same[0], samples=samples)


def _row(name: str, engine: MonitoredEngine, show_values: bool) -> dict[str, Any]:
    letters = [each.row() for each in engine.dead_letters]
    if not show_values:
        for each in letters:
            del each["value"]
    return {"name": name, "status": to_builtins(engine.status()), "dead_letters": letters}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], pages: Mapping[str, tuple[str, Callable[[], str]]]) -> None:
        self.pages: Final = pages
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path)
        if page is None:
            self.send_error(404)
            return
        content_type, text = page
        try:
            body = text().encode()
        except Exception:
            logger.exception("status_failed path=%s", self.path)
            self.send_error(500)
            return
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Requests are not logged."""
