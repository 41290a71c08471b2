"""The program in docs/queries.md: as it stands, and on a merged log where it is stopped and started again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from merged_logs import BASE_NS, Feeds

import rt

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


def test_the_program_of_the_page_goes_on_where_it_was(tmp_path: Path) -> None:
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


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(program_of(PAGE), {})  # noqa: S102 - our own page
    with rt.LogReader(tmp_path / "data" / "shop" / "sessions" / "queries") as reader:
        published = [(each.topic, json.loads(each.value)) for each in reader]
    assert sorted(published, key=str) == [
        ("alerts", {"symbol": "IBM", "value": 101}),
        ("sessions", {"user": "ann", "pages": ["/", "/buy"]}),
        ("top", [["/", 1], ["/buy", 1]]),
    ]
