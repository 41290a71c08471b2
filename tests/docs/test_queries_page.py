"""The programs in docs/queries.md run unchanged, and continue when they are stopped and restarted."""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from merged_logs import BASE_NS, Feeds
from postgres_server import PostgresServer

import rt
from sequencer.localcluster.nodes import LocalCluster
from sequencer.localcluster.processes import nothing_left

PAGE = (Path(__file__).parents[2] / "docs" / "queries.md").read_text()


def program_of(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))


def click(second: float, user: str, page: str) -> tuple[float, str, dict[str, Any]]:
    return second, "click", {"user": user, "page": page}


def price(second: float, symbol: str, value: float) -> tuple[float, str, dict[str, Any]]:
    return second, "price", {"symbol": symbol, "value": value}


FIRST = [
    price(0, "IBM", 99),
    price(1, "IBM", 101),
    price(2, "XYZ", 500),
    price(3, "IBM", 102),
    click(5, "ann", "/"),
    click(10, "bob", "/"),
    click(30, "ann", "/buy"),
]
THEN = [
    price(35, "IBM", 90),
    price(36, "IBM", 103),
    click(50, "bob", "/help"),
    click(70, "bob", "/help"),
    click(200, "cid", "/"),
]
WANTED = [
    ("alerts", {"symbol": "IBM", "value": 101}),
    ("alerts", {"symbol": "IBM", "value": 103}),
    ("sessions", {"user": "bob", "pages": ["/"]}),
    ("sessions", {"user": "ann", "pages": ["/", "/buy"]}),
    ("top", [["/", 2], ["/buy", 1]]),
    ("sessions", {"user": "bob", "pages": ["/help", "/help"]}),
    ("top", [["/help", 2]]),  # The first round minute of these logs ends at second 40.
]


def publish(feeds: Feeds, events: Iterable[tuple[float, str, Any]]) -> int:
    for second, topic, value in events:
        feeds.publish("a", [json.dumps(value).encode()], topic, [BASE_NS + round(second * 1e9)])
    return feeds.merge().stop


def test_program_of_page_continues_after_restart(tmp_path: Path) -> None:
    program = program_of(PAGE.partition("\n## Three queries\n")[2])  # without the page's own data
    feeds = Feeds(tmp_path, ["a"])
    for events in (FIRST, THEN):
        end = publish(feeds, events)
        names: dict[str, Any] = {"log": feeds.path, "directory": str(tmp_path)}
        names["stopped"] = lambda names=names, end=end: names["engine"].watermarks == {"feed": end - 1}
        exec(program, names)  # noqa: S102 - our own page
    with rt.LogReader(tmp_path / "shop" / "sessions" / "queries") as reader:
        published = [(each.topic, json.loads(each.value)) for each in reader]
    assert sorted(published, key=str) == sorted(WANTED, key=str)
    assert [each for each in published if each[0] == "alerts"] == WANTED[:2]


def test_program_of_page_runs_unchanged_and_publishes_expected_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(program_of(PAGE), {})  # noqa: S102 - our own page
    with rt.LogReader(tmp_path / "data" / "shop" / "sessions" / "queries") as reader:
        published = [(each.topic, json.loads(each.value)) for each in reader]
    assert sorted(published, key=str) == [
        ("alerts", {"symbol": "IBM", "value": 101}),
        ("sessions", {"user": "ann", "pages": ["/", "/buy"]}),
        ("top", [["/", 1], ["/buy", 1]]),
    ]


@pytest.fixture
def node() -> Iterator[LocalCluster]:
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    before = signal.getsignal(signal.SIGTERM)
    try:
        with nothing_left(), LocalCluster(root, 1, stream="shop") as nodes:
            nodes.start()
            nodes.wait_ready()
            yield nodes
    finally:
        signal.signal(signal.SIGTERM, before)  # The program has set its own handler.
        shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_failover_engine_of_page_publishes_each_result_once_over_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: LocalCluster, postgres: PostgresServer
) -> None:
    """The program ends when the result is merged. Its lease and its store are then free for the next run."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program_of(PAGE), names)  # noqa: S102 - our own page
    (program,) = (
        text for text in re.findall(r"```python cluster\n(.*?)```", PAGE, re.DOTALL) if "Host(" in text
    )
    names["reading"] = node.certificate("subscriber", "queries", lease_groups=["queries"])
    names["writing"] = node.certificate("publisher", "results", dedup_ids=["results"])
    for old, new in {
        r"nodes = \[.*\]": f"nodes = {node.endpoints!r}",
        r'url = ".*"': f"url = {postgres.url!r}",
        r"(reading|writing) = .*\n": "",
        r'schema="\w+"': f'schema="{PostgresServer.schema(tmp_path)}"',
    }.items():
        program, count = re.subn(old, new.replace("\\", r"\\"), program)
        assert count, old

    def results() -> list[Any]:
        with rt.LogReader(node.merged_directory("n1"), topics=["alerts"]) as reader:
            return [json.loads(each.value) for each in reader]

    def stop_after(count: int) -> None:
        while len(results()) < count or "stopping" not in names:
            time.sleep(0.02)
        names["stopping"].set()

    tls = node.certificate("publisher", "feed")
    with rt.Publisher("feed", "shop", publisher_id="feed", endpoints=node.endpoints, tls=tls) as feed:
        for turn in (1, 2):
            for value in (99, 100 + turn):
                feed.publish(json.dumps({"symbol": "IBM", "value": value}).encode(), topic="price")
            names.pop("stopping", None)
            watch = threading.Thread(target=stop_after, args=(turn,))
            watch.start()
            exec(program, names)  # noqa: S102 - our own page
            watch.join()
    assert [each["value"] for each in results()] == [101, 102]
