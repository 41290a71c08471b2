"""The operators' web page: served files, content security, accessibility, and what a browser shows."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from page_bench import HOSTILE, POSITION, Dom, PageNode, browse, busy_node, busy_standing, chromium
from rest_node import OPERATOR, SUBSCRIBER

from rt.errors import CertificateError
from sequencer.rest.base.node_snapshot import NodeSnapshot
from sequencer.rest.base.request import Request
from sequencer.rest.http.dispatcher import check_role
from sequencer.rest.page import PAGE_FILES, POLICY
from sequencer.rest.views.context import Response
from sequencer.rest.views.endpoints import ENDPOINTS, OPERATORS, RestEndpoint

FILES = {file.path: file for file in PAGE_FILES}
SCRIPTS = {path: file.text for path, file in FILES.items() if path.endswith(".js")}
PAGE = FILES["/"].text
NOTHING = "\N{EN DASH}"
DOCS = Path(__file__).parents[2] / "docs"
PICTURE, PICTURE_SIZE = "status-page.png", (1100, 1445)


def answers(*requests: Request) -> list[Any]:
    """The answers of a running node."""

    async def ask() -> list[Any]:
        node = PageNode(busy_node)
        async with node.serving():
            return [await node.answering.answer(request, None) for request in requests]

    return asyncio.run(ask())


# As files


def test_page_files_are_served_with_content_type_and_page_with_security_policy() -> None:
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', PAGE))
    for path, text in SCRIPTS.items():
        named |= {f"page/{name}" for name in re.findall(r'from "\./([\w.]+)"', text)}
        assert set(re.findall(r'from "(.+?)"', text)) <= {f"./{Path(other).name}" for other in SCRIPTS}, path
    assert {f"/{name}" for name in named} | {"/"} == set(FILES)

    for path, reply in zip(FILES, answers(*(Request("GET", path) for path in FILES)), strict=True):
        assert (reply.status, reply.body.decode()) == (200, FILES[path].text)
        assert reply.content_type == FILES[path].content_type
        assert reply.headers.get("Content-Security-Policy") == (POLICY if path == "/" else None)


def test_content_security_policy_allows_only_same_origin_resources() -> None:
    rules = dict(part.strip().split(" ", 1) for part in POLICY.split(";"))

    assert rules.pop("default-src") == "'none'"
    assert {rules.pop(kind) for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert set(rules) == {"base-uri", "form-action", "frame-ancestors"}
    assert set(rules.values()) == {"'none'"}


def test_page_has_no_inline_code_and_no_external_resources() -> None:
    assert not re.search(r"<style|\bstyle=|<script(?![^>]+src=)|\son\w+=|javascript:", PAGE)
    for path, file in FILES.items():
        away = re.findall(r"https?://[\w./]+|//[\w-]+\.\w+|@import|url\(", file.text)
        assert set(away) <= {"http://www.w3.org/2000/svg"}, path


@pytest.mark.parametrize("path", SCRIPTS)
def test_page_script_contains_no_call_to_create_markup_from_text(path: str) -> None:
    ways = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML"
    )

    assert not re.search(rf"{ways}|\beval\b|new Function|srcdoc|\.(href|src)\s*=", SCRIPTS[path])


def test_page_element_ids_are_unique_and_include_all_used_by_scripts() -> None:
    ids = re.findall(r'\bid="([\w-]+)"', PAGE)
    wanted = set(re.findall(r'(?:byId|note|sayProblem)\(\s*"([\w-]+)"', "\n".join(SCRIPTS.values())))

    assert len(set(ids)) == len(ids)
    assert wanted <= set(ids)
    assert set(re.findall(r'aria-labelledby="([\w-]+)"', PAGE)) <= set(ids)


def test_page_is_readable_only_by_operators() -> None:
    mine = [one for one in ENDPOINTS if one.path in FILES]

    assert len(mine) == len(FILES)
    for endpoint in mine:
        assert endpoint.roles == OPERATORS
        assert not endpoint.is_public
        check_role(endpoint, OPERATOR)
        with pytest.raises(CertificateError, match="this role may not read this path"):
            check_role(endpoint, SUBSCRIBER)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_text_contrast_is_at_least_4_5(scheme: str) -> None:
    blocks = re.findall(r":root \{(.*?)\}", FILES["/page/page.css"].text, re.DOTALL)
    colors = dict(re.findall(r"--([\w-]+): #(\w+);", blocks[["light", "dark"].index(scheme)]))

    pairs = [(front, back) for front in ("text", "muted", "accent") for back in ("card", "back")]
    pairs += [(level, f"{level}-back") for level in ("ok", "warning", "critical")]
    pairs += [("text", f"{level}-back") for level in ("warning", "critical", "info")] + [
        ("accent", "info-back")
    ]
    for front, back in pairs:
        assert contrast(colors[front], colors[back]) >= 4.5, (front, back)


def contrast(one: str, other: str) -> float:
    """As WCAG 2.2 defines it."""

    def luminance(color: str) -> float:
        color = "".join(digit * 2 for digit in color) if len(color) == 3 else color
        parts = [int(color[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# In a browser


def shown(
    profile: Path,
    look: Callable[[], NodeSnapshot] = busy_node,
    *more: RestEndpoint,
    path: str = "",
    **options: Any,
) -> tuple[Dom, PageNode]:
    """Return the content of the page after some seconds, and the node that it queried."""
    chromium()  # Skips the test if no browser is installed.

    async def whole() -> tuple[Dom, PageNode]:
        node = PageNode(look, **options)
        async with node.serving(*more):
            return Dom(await browse(node.url + path, profile)), node

    return asyncio.run(whole())


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Dom:
    return shown(tmp_path_factory.mktemp("profile"))[0]


@pytest.mark.slow
def test_page_shows_cluster_and_members_with_phase_lag_and_disk(busy: Dom) -> None:
    assert busy.texts["stream"] == "trades"
    assert busy.texts["about"] == "Reported by node n1 (rt 0.1.0), cluster 40414243, epoch 1."
    assert "Leader n2 term 5" in busy.texts["overview"]
    assert "Next position 4,000,400 instruction 81,234" in busy.texts["overview"]
    n1, n2, n3 = busy.rows("members")[1:]
    assert n1 == [
        "n1 | n1.rt:5002",
        "follower",
        "ready",
        "4,000,400",
        "none",
        "48 % of 1000 GiB, policy 90 %",
    ]
    assert n2[:3] == ["n2 | n2.rt:5002", "leader", "ready"]
    assert n3[2:5] == ["copying 77 %", "3,100,000", "900,400 messages | 7.55 GiB"]
    meters = [attributes for _, attributes in busy.tags if attributes.get("role") == "meter"]
    disk = next(one for one in meters if (one["aria-label"] or "").startswith("Disk of n3"))
    assert (disk["aria-valuenow"], disk["data-level"]) == ("96", "critical")


@pytest.mark.slow
def test_page_shows_sessions_and_subscribers_with_lag_and_holds(busy: Dom) -> None:
    assert busy.rows("sessions")[1:] == [
        [
            f"{HOSTILE} | id 1",
            "open",
            "connected | 10.0.0.7:41000",
            "12,000 | run 3",
            "900 messages",
            "30.0 MiB/s",
        ],
        [
            "quotes | id 2, dedup d1",
            "open",
            "connected | 10.0.0.8:41000",
            "980 | run 3",
            "none",
            "2.38 MiB/s",
        ],
        ["weather | id 3", "completely merged", "not connected", "all | run 0", NOTHING, NOTHING],
    ]
    audit, export, desk = busy.rows("subscribers")[1:]
    assert audit[0] == "audit | 10.0.0.9:5100"
    assert audit[2:] == ["4,000,000", "400 messages", "26.7 MiB/s", "981 MiB | from 3,900,000"]
    assert export[:4] == ["export", "not connected", "2,400,000", "1,600,400 messages"]
    assert desk[:4] == [
        "desk | 10.0.0.10:5100",
        "not connected | left this node 1 min ago",
        "3,999,000",
        "1,400 messages",
    ]


@pytest.mark.slow
def test_page_shows_log_history_and_retention_policy(busy: Dom) -> None:
    told = (
        "32 sealed segments kept (26.6 GiB), 1 active (128 MiB), 8 trimmed (6.37 GiB: 2 by size, 6 by time)."
    )
    assert busy.texts["history-note"] == told
    assert busy.texts["policy"].startswith(
        "By time after 7 d; the oldest was sealed 5 d ago By size 26.8 GiB of 90.0 GiB"
    )
    bars = [
        attributes["data-state"]
        for tag, attributes in busy.tags
        if tag == "rect" and "data-state" in attributes
    ]
    assert bars == ["trimmed"] * 8 + ["sealed"] * 32 + ["active"]
    (drawing,) = (attributes for tag, attributes in busy.tags if attributes.get("role") == "img")
    assert drawing["aria-label"] == told
    assert busy.rows("segments")[1][0] == "trades/merged/log.0.40"


@pytest.mark.slow
def test_page_shows_alarms_and_has_one_polite_aria_live_region(busy: Dom) -> None:
    assert busy.texts["alarms"].startswith("critical disk The disk of n3 is 96.0 % full")
    assert busy.texts["health"] == "3 alarms"
    assert busy.title == "(3) trades: 3 alarms · rt"
    levels = [
        attributes["data-level"]
        for tag, attributes in busy.tags
        if tag == "li" and "data-level" in attributes
    ]
    assert levels == ["critical", "warning", "warning"]
    live = [attributes.get("aria-live") for _, attributes in busy.tags if "aria-live" in attributes]
    assert live == ["polite"]
    assert busy.attributes["connection"]["role"] == "alert"
    assert "hidden" in busy.attributes["connection"]


@pytest.mark.slow
def test_page_shows_hostile_client_name_as_text(busy: Dom) -> None:
    assert HOSTILE in busy.rows("sessions")[1][0]
    assert not [tag for tag, _ in busy.tags if tag == "img"]
    assert [attributes.get("src") for tag, attributes in busy.tags if tag == "script"] == ["page/main.js"]
    assert not [name for _, attributes in busy.tags for name in attributes if name.startswith("on")]


@pytest.mark.slow
def test_page_tables_have_explicit_aria_roles_and_header_scopes(busy: Dom) -> None:
    roles = {"table": {"table"}, "tr": {"row"}, "td": {"cell"}, "th": {"columnheader", "rowheader"}}
    for tag, wanted in roles.items():
        found = {attributes.get("role") for name, attributes in busy.tags if name == tag}
        assert found == wanted, tag
    assert all(attributes.get("scope") for tag, attributes in busy.tags if tag == "th")


@pytest.mark.slow
def test_page_shows_rates_computed_from_successive_polls(tmp_path: Path) -> None:
    count = 0

    def growing() -> NodeSnapshot:
        nonlocal count
        count += 1
        node = busy_node()
        assert node.state is not None
        node.state.position += 1000 * count
        node.state.merged.total_bytes += count * 2**20
        return replace(
            node,
            clients=tuple(replace(one, total_bytes=one.total_bytes + count * 2**20) for one in node.clients),
        )

    page, node = shown(tmp_path, growing)

    assert node.asked.count("/status") >= 3
    found = re.search(
        r"Merged ([\d.]+) ([KM]iB)/s (\d[\d,]*) messages/s Ingest at n1 ([\d.]+) ", page.texts["overview"]
    )
    assert found is not None
    assert all(float(number.replace(",", "")) > 0 for number in (found[1], found[3], found[4]))


@pytest.mark.slow
def test_page_shows_connection_alert_and_last_data_when_node_stops_answering(tmp_path: Path) -> None:
    page, node = shown(tmp_path, gone_after=2)

    assert node.asked.count("/status") == 2
    assert re.fullmatch(
        r"The node does not answer: it cannot be reached\. The page shows data of \d\d:\d\d:\d\d\. "
        r"Retrying\.",
        page.texts["connection"],
    )
    assert "hidden" not in page.attributes["connection"]
    assert page.texts["health"] == "no answer"
    assert page.rows("members")[1][0].startswith("n1")


@pytest.mark.slow
def test_page_is_shown_for_node_without_leader_and_cluster(tmp_path: Path) -> None:
    standing = busy_standing(leader="", role="candidate", is_caught_up=False)
    blank = busy_node(state=None, merging=None, clients=(), standing=standing)

    page, _ = shown(tmp_path, lambda: blank)

    assert page.texts["about"].endswith("no cluster yet.")
    assert "Leader none known" in page.texts["overview"]
    assert "no leader is known" in page.texts["alarms-note"]
    assert "has not joined its cluster yet" in page.texts["history-note"]
    assert page.rows("sessions") == [] or len(page.rows("sessions")) == 1


# Scripts that only calculate, run by the same browser

CHECKS = """
import { pauseMs } from "./poll.js";
import { Rate, Sum } from "./rates.js";
import { bytes, count, percent, several, span } from "./words.js";

const rate = new Rate();
const sum = new Sum();
const told = {
  pauses: [
    { failures: 0, isHidden: false, tookMs: 20 },
    { failures: 0, isHidden: false, tookMs: 3000 },
    { failures: 0, isHidden: true, tookMs: 20 },
    { failures: 1, isHidden: false, tookMs: 8000 },
    { failures: 3, isHidden: false, tookMs: 8000 },
    { failures: 50, isHidden: false, tookMs: 8000 },
  ].map(pauseMs),
  rates: [[0, 0], [10, 1000], [10, 1000], [30, 3000], [5, 4000], [7, 5000]]
    .map(([value, atMs]) => rate.add(value, atMs)),
  sums: [{ a: 5 }, { a: 9, b: 3 }, { b: 4 }, { a: 2, b: 4 }]
    .map((one) => sum.add(new Map(Object.entries(one)))),
  bytes: [0, 1023, 1024, 1536, 123456789, 1023.6 * 1024, 2 ** 50].map(bytes),
  words: [count(1234567), several(1, "hold"), several(2, "hold"), percent(0.999), percent(1)],
  spans: [59, 60, 7200, 86400, -5].map(span),
};
document.getElementById("told").textContent = JSON.stringify(told);
"""


@pytest.mark.slow
def test_page_script_returns_expected_pauses_rates_and_formatted_values(tmp_path: Path) -> None:
    script = '<script type="module" src="page/check.js"></script>'
    page = f'<!doctype html><meta charset="utf-8"><p id="told"></p>{script}'
    kinds = "text/html; charset=utf-8", "text/javascript; charset=utf-8"

    seen, _ = shown(
        tmp_path,
        busy_node,
        RestEndpoint(
            "/check", "A page.", lambda _: Response(page), str, content_type=kinds[0], policy=POLICY
        ),
        RestEndpoint("/page/check.js", "A script.", lambda _: Response(CHECKS), str, content_type=kinds[1]),
        path="check",
    )

    told = json.loads(seen.texts["told"])
    assert told["pauses"] == [2000, 12_000, 30_000, 4000, 16_000, 30_000]
    assert told["rates"] == [None, 10, 10, 10, None, 2]
    assert told["sums"] == [0, 7, 8, 10]
    assert told["bytes"] == ["0 B", "1023 B", "1.00 KiB", "1.50 KiB", "118 MiB", "1024 KiB", "1.00 PiB"]
    assert told["words"] == ["1,234,567", "1 hold", "2 holds", "99 %", "100 %"]
    assert told["spans"] == ["59 s", "1 min", "2 h", "1 d", "0 s"]


def test_page_screenshot_in_docs_is_png_of_expected_size(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """`--rewrite` draws it again, where there is a browser."""
    drawn = DOCS / PICTURE
    if request.config.getoption("--rewrite"):
        drawn = tmp_path / PICTURE
        chromium()  # Skips the test if no browser is installed.

        async def draw() -> None:
            node = PageNode(busy_node)
            async with node.serving():
                size = f"--window-size={PICTURE_SIZE[0]},{PICTURE_SIZE[1]}"
                await browse(
                    node.url, tmp_path / "profile", f"--screenshot={drawn}", size, "--hide-scrollbars"
                )

        asyncio.run(draw())

    content = drawn.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == PICTURE_SIZE
    assert len(content) > 50_000, "an empty page"
    assert f"]({PICTURE})" in (DOCS / "operations.md").read_text()
    if request.config.getoption("--rewrite"):
        (DOCS / PICTURE).write_bytes(content)


def test_busy_node_fixture_answers_every_request_of_page() -> None:
    asked = [
        "/status",
        "/rt-clients?limit=2000",
        "/sessions?limit=2000",
        "/holds",
        "/cluster-clients",
        "/log-history?limit=2000&offset=0",
    ]

    for path, reply in zip(asked, answers(*(Request("GET", path) for path in asked)), strict=True):
        assert reply.status == 200, path
    assert (
        json.loads(answers(Request("GET", "/latest-out-position"))[0].body)["latestOutPosition"]
        == POSITION - 1
    )
