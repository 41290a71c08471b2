"""The status page in a real browser: a node with much content, served over loopback, and Chromium's DOM."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace
from rest_node import CLUSTER, MINUTE, OPERATOR, SECOND, T0, at

from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.net.identity import Identity
from rt.v1 import sequencer_pb2 as pb
from sequencer.rest.base.node_snapshot import ClientConnection, Counts, MergeStatus, NodeSnapshot
from sequencer.rest.http.app import App
from sequencer.rest.http.dispatcher import Dispatcher
from sequencer.rest.http.listener import HttpListener
from sequencer.rest.views.context import RequestContext, Response
from sequencer.rest.views.endpoints import ENDPOINTS, RestEndpoint
from sequencer.state.configuration import Configuration
from sequencer.state.state import (
    ActiveRun,
    ConsumedEnd,
    End,
    MergedEnd,
    MergedSegment,
    SequencerState,
    Session,
    SubscriberHold,
)

GIB: Final = 1 << 30
HOUR: Final = 60
HOSTILE: Final = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
"""No node accepts this name for a session, but the page must not depend on that."""
POSITION: Final = 4_000_400


def busy_state(*, session: str = HOSTILE) -> SequencerState:
    """41 merged segments, four hours each: 8 trimmed, 32 kept, one that grows; three sessions, two holds."""
    segments = deque[MergedSegment]()
    for roll in range(40):
        ends = at(4 * HOUR * roll), at(4 * HOUR * (roll + 1))
        size = GIB - (roll * 7919 % 11) * (GIB // 30)
        one = MergedSegment(SegmentId(0, roll), roll * 100_000, (roll + 1) * 100_000, size, *ends)
        if roll < 8:
            reason = TrimReason.SIZE if roll < 2 else TrimReason.TIME
            one = replace(one, trimmed_ns=ends[1] + 3 * MINUTE, reason=reason)
        segments.append(one)
    feed = partial(Session, last_run=3, active_runs=(ActiveRun(3, b"\3" * 8),))
    state = SequencerState(
        CLUSTER,
        Configuration(retention_bytes=90 * GIB, roll_minutes=4 * HOUR),
        instruction=81_234,
        sequenced_ns=at(4 * HOUR * 40 + 30),
        position=POSITION,
        merged=MergedEnd(SegmentId(0, 40), GIB // 8, 4_000_000, at(4 * HOUR * 40), {1, 2}, 0xABCD, 38 * GIB),
        sessions={
            1: feed(1, session, b"\1" * 16, None, consumed=ConsumedEnd(End(4, 64, 12_000), 7)),
            2: feed(2, "quotes", b"\2" * 16, "d1", consumed=ConsumedEnd(End(1, 64, 980), 7)),
            3: Session(3, "weather", b"\3" * 16, None, last_run=0, done=(0, End(0, 64, 77))),
        },
        segments=segments,
        next_session_id=4,
        holds={
            "audit": SubscriberHold(3_900_000, at(4 * HOUR * 40)),
            "export": SubscriberHold(2_400_000, at(9000)),
        },
        closed={3: None},
    )
    state.index()
    return state


def busy_standing(**changes: Any) -> pb.Standing:
    """n2 leads, n1 answers, n3 catches up."""
    fields = {"node": "n1", "leader": "n2", "term": 5, "role": "follower", "epoch": 1, "is_caught_up": True}
    made = pb.Standing(**{**fields, **changes})
    clock = at(4 * HOUR * 40 + 30)
    for name, position, free in (("n1", POSITION, 520), ("n2", POSITION, 190), ("n3", 3_100_000, 40)):
        behind = POSITION - position
        summary = pb.Summary(
            clock_ns=clock,
            merged=pb.MergedReport(
                instruction=81_234, chain=1, bytes=38 * GIB - behind * 9000, position=position
            ),
            disk_bytes=1000 * GIB,
            disk_free_bytes=free * GIB,
            step="copying" if behind else "ready",
            step_done=position if behind else 0,
            step_total=POSITION if behind else 0,
        )
        made.nodes.add(
            name=name, address=f"{name}.rt:5002", is_connected=name != "n1", is_counted=True, summary=summary
        )
    return made


def busy_node(**changes: Any) -> NodeSnapshot:
    """A follower of a busy cluster, unless `changes` say otherwise."""
    identities = {role: partial(Identity, "trades", role) for role in ("publisher", "subscriber")}
    publisher, subscriber = identities["publisher"], identities["subscriber"]
    now = at(4 * HOUR * 40 + 30)
    fields: dict[str, Any] = {
        "stream": "trades",
        "node": "n1",
        "now_ns": now,
        "started_ns": T0,
        "standing": busy_standing(),
        "applied_index": 99_000,
        "state": busy_state(),
        "merging": MergeStatus(81_234, POSITION, POSITION - 10),
        "clients": (
            ClientConnection(
                publisher("feed"), "10.0.0.7:41000", HOSTILE, T0, 0, now, 7 * GIB, 31.5e6, 12_900, 12_000
            ),
            ClientConnection(
                publisher("quotes"), "10.0.0.8:41000", "quotes", T0, 0, now, GIB, 2.5e6, 980, 980
            ),
            ClientConnection(
                subscriber("audit"), "10.0.0.9:5100", None, T0, 0, now, GIB, 28e6, POSITION - 400
            ),
            ClientConnection(
                subscriber("desk"), "10.0.0.10:5100", None, T0, now - 90 * SECOND, now, GIB, 0.0, 3_999_000
            ),
            ClientConnection(
                Identity("trades", "node", "n3"), "10.0.0.3:1", None, T0, 0, now, GIB, 9e6, 3_100_000
            ),
        ),
        "counts": Counts(certificate_end_s=now / SECOND + 9.5 * 86400),
    }
    return NodeSnapshot(**{**fields, **changes})


class PageNode:
    """A node that answers every client as an operator, without TLS.

    With `gone_after`, it closes its port at the request for /holds after that many requests for /status.
    """

    def __init__(self, look: Callable[[], NodeSnapshot], *, gone_after: int | None = None) -> None:
        self._look, self._gone_after = look, gone_after
        self.asked: list[str] = []
        """The requested paths, in order."""
        self._listener: HttpListener
        self.answering: Dispatcher

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.port}/"

    @contextlib.asynccontextmanager
    async def serving(self, *more: RestEndpoint) -> AsyncIterator[PageNode]:
        """Serve the node's endpoints, and also `more`."""
        endpoints = [replace(one, is_public=True, view=self._view(one)) for one in (*ENDPOINTS, *more)]
        with ThreadPoolExecutor(1) as pool:
            self.answering = Dispatcher(endpoints, self._look, pool, stream=None)
            runner = App(self.answering).runner()
            await runner.setup()
            make = runner.server
            assert make is not None
            self._loop = asyncio.get_running_loop()
            self._listener = HttpListener("page", make, ("127.0.0.1", 0), lambda: None)
            self._listener.start()
            try:
                yield self
            finally:
                await runner.cleanup()
                await self._listener.close()

    def _view(self, endpoint: RestEndpoint) -> Callable[[RequestContext], Response]:
        def view(asked: RequestContext) -> Response:
            self.asked.append(endpoint.path)
            if endpoint.path == "/holds" and self.asked.count("/status") == self._gone_after:
                asyncio.run_coroutine_threadsafe(self._listener.close(), self._loop)
            return endpoint.view(replace(asked, identity=OPERATOR))

        return view


def chromium() -> str:
    """Return the path of the browser. Skip the test if there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here: on Debian, apt-get install chromium")
    return found


async def browse(url: str, profile: Path, *options: str, virtual_ms: int = 5000, wait_s: float = 120) -> str:
    """Return the DOM after `virtual_ms` of the page's own time, which stops while something is loaded."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    process = await asyncio.create_subprocess_exec(
        chromium(),
        *flags,
        "--disable-background-networking",
        f"--user-data-dir={profile}",
        f"--virtual-time-budget={virtual_ms}",
        *options,
        *(() if any("--screenshot" in one for one in options) else ("--dump-dom",)),
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(wait_s):
            content, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return content.decode()


class Dom(HTMLParser):
    """The content of a dumped DOM: text and attributes by id, tables as lists of cells."""

    _VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, content: str) -> None:
        super().__init__()
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.texts: dict[str, str] = {}
        """By id."""
        self.attributes: dict[str, dict[str, str | None]] = {}
        """By id."""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.title = ""
        self._rows: dict[str, list[list[str]]] = {}
        self.feed(content)

    def rows(self, place: str) -> list[list[str]]:
        """Return the rows of the table in that element: the text of each cell, its parts joined by " | "."""
        return self._rows.get(place, [])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if attributes.get("id"):
            self.attributes[str(attributes["id"])] = attributes
        if tag == "tr" and self._place() is not None:
            self._rows.setdefault(str(self._place()), []).append([])
        if tag not in self._VOID:
            self._open.append((tag, attributes, []))

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            opened, attributes, parts = self._open.pop()
            text = (" | " if opened in {"td", "th"} else " ").join(filter(None, parts))
            if self._open and text:
                self._open[-1][2].append(text)
            if attributes.get("id"):
                self.texts[str(attributes["id"])] = text
            if opened in {"td", "th"} and (place := self._place()) is not None:
                self._rows[place][-1].append(text)
            if opened == "title" and not self.title:
                self.title = text
            if opened == tag:
                break

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self._open[-1][2].append(" ".join(data.split()))

    def _place(self) -> str | None:
        """Return the id of the element that contains the open table."""
        opened = [index for index, (tag, _, _) in enumerate(self._open) if tag == "table"]
        return str(self._open[opened[-1] - 1][1].get("id")) if opened else None
