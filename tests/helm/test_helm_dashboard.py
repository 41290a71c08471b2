"""The Grafana dashboards are well formed, and their panels query existing metrics only."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prom_rules import HELM, check_names, names_in, node_metrics, promtool, stream_metrics

FILES = {
    "rt.json": (node_metrics(), "rt_info"),
    "rt-streams.json": (stream_metrics(), "rt_streams_queue_owned"),
}
"""The dashboards, with the metrics of each and the metric that distinguishes streams."""
TEXTS = {name: (HELM / "dashboards" / name).read_text() for name in FILES}
DASHBOARDS: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in TEXTS.items()}
SHOWN = [
    pytest.param(panel, id=f"{name}-{panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
]
UNITS = {"none", "s", "bytes", "Bps", "ops", "percentunit"}
each_dashboard = pytest.mark.parametrize("name", FILES)


def expressions(name: str) -> list[tuple[str, str]]:
    """Return each query of a dashboard, with the title of its panel."""
    panels = [panel for panel in DASHBOARDS[name]["panels"] if panel["type"] != "row"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


@each_dashboard
def test_dashboard_has_fields_required_by_grafana(name: str) -> None:
    dashboard = DASHBOARDS[name]
    panels = dashboard["panels"]
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time", "refresh"} <= set(dashboard)
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", dashboard["uid"])
    assert dashboard["schemaVersion"] >= 36
    assert "id" not in dashboard, "it is given by the Grafana that imports it"
    assert {panel["type"] for panel in panels} == {"row", "stat", "timeseries"}
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)


def test_dashboard_titles_and_uids_are_unique() -> None:
    for field in ("title", "uid"):
        assert len({dashboard[field] for dashboard in DASHBOARDS.values()}) == len(FILES)


@each_dashboard
def test_dashboard_panels_fit_24_columns_without_overlap(name: str) -> None:
    places = [panel["gridPos"] for panel in DASHBOARDS[name]["panels"]]

    for one in places:
        assert set(one) == {"h", "w", "x", "y"}
        assert one["x"] >= 0
        assert one["x"] + one["w"] <= 24
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below
    assert places == sorted(places, key=lambda one: (one["y"], one["x"]))


@pytest.mark.parametrize("panel", SHOWN)
def test_panel_has_description_source_unit_and_legends(panel: dict[str, Any]) -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}

    assert panel["description"].endswith(".")
    assert panel["datasource"] == source
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert [target["refId"] for target in panel["targets"]] == [*"ABCDEF"[: len(panel["targets"])]]
    for target in panel["targets"]:
        assert target["datasource"] == source
        assert target["legendFormat"]


@each_dashboard
def test_dashboard_panels_query_only_existing_metrics(name: str) -> None:
    for title, expression in expressions(name):
        check_names(expression, where=title)
        assert "$namespace" in expression
        assert "$job" in expression


@each_dashboard
def test_dashboard_shows_every_metric_except_fsync_sum(name: str) -> None:
    shown = {metric for _, expression in expressions(name) for metric in names_in(expression)}

    assert set(FILES[name][0]) - shown <= {"rt_fsync_seconds_sum"}
    assert shown <= set(FILES[name][0])


@each_dashboard
def test_dashboard_variables_are_datasource_namespace_and_job(name: str) -> None:
    variables = {one["name"]: one for one in DASHBOARDS[name]["templating"]["list"]}

    assert [*variables] == ["datasource", "namespace", "job"]
    assert variables["datasource"]["query"] == "prometheus"
    for variable in ("namespace", "job"):
        assert variables[variable]["query"].startswith(f"label_values({FILES[name][1]}")
    assert set(re.findall(r"\$\{?(\w+)\}?", TEXTS[name])) <= {*variables, "__rate_interval", "__all"}


@pytest.mark.slow
def test_promtool_accepts_every_panel_expression(tmp_path: Path) -> None:
    program = promtool()
    rules = [
        {"record": f"rt:panel{index}", "expr": re.sub(r"\$__rate_interval", "5m", expression)}
        for index, (_, expression) in enumerate(found for name in FILES for found in expressions(name))
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))

    done = subprocess.run([program, "check", "rules", path], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
