from __future__ import annotations

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prom_rules import HELM, check_names, known_metrics, names_in, promtool

TEXT = (HELM / "dashboards" / "rt.json").read_text()
DASHBOARD: dict[str, Any] = json.loads(TEXT)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in SHOWN for target in panel["targets"]]
UNITS = {"none", "s", "bytes", "Bps", "ops", "percentunit"}


def test_the_dashboard_has_what_grafana_wants_of_one() -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time", "refresh"} <= set(DASHBOARD)
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["schemaVersion"] >= 36
    assert "id" not in DASHBOARD, "it is given by the Grafana that imports it"
    assert {panel["type"] for panel in PANELS} == {"row", "stat", "timeseries"}
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)


def test_the_panels_fill_a_grid_of_24_columns_and_none_lies_on_another() -> None:
    places = [panel["gridPos"] for panel in PANELS]

    for one in places:
        assert set(one) == {"h", "w", "x", "y"}
        assert one["x"] >= 0
        assert one["x"] + one["w"] <= 24
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below
    assert places == sorted(places, key=lambda one: (one["y"], one["x"]))


@pytest.mark.parametrize("panel", SHOWN, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_of_which_source_in_which_unit(panel: dict[str, Any]) -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}

    assert panel["description"].endswith(".")
    assert panel["datasource"] == source
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert [target["refId"] for target in panel["targets"]] == [*"ABCDEF"[: len(panel["targets"])]]
    for target in panel["targets"]:
        assert target["datasource"] == source
        assert target["legendFormat"]


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_a_panel_asks_only_for_metrics_that_a_node_tells(title: str, expression: str) -> None:
    check_names(expression, where=title)
    assert "$namespace" in expression
    assert "$job" in expression


def test_every_metric_is_shown_but_those_that_only_tell_of_others() -> None:
    shown = {name for _, expression in EXPRESSIONS for name in names_in(expression)}

    assert set(known_metrics()) - shown == {"rt_fsync_seconds_sum"}


def test_variables_are_the_source_and_what_tells_streams_apart() -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}

    assert [*variables] == ["datasource", "namespace", "job"]
    assert variables["datasource"]["query"] == "prometheus"
    for name in ("namespace", "job"):
        assert variables[name]["query"].startswith("label_values(rt_info")
    assert set(re.findall(r"\$\{?(\w+)\}?", TEXT)) <= {*variables, "__rate_interval", "__all"}


@pytest.mark.slow
def test_prometheus_understands_every_expression(tmp_path: Path) -> None:
    program = promtool()
    rules = [
        {"record": f"rt:panel{index}", "expr": re.sub(r"\$__rate_interval", "5m", expression)}
        for index, (_, expression) in enumerate(EXPRESSIONS)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))

    done = subprocess.run([program, "check", "rules", path], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
