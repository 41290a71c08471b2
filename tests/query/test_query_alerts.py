"""Query alert rules in docs/operations.md: their metrics exist, and each alert fires for its fault."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_blocks import ROOT
from prom_rules import labels_in, names_in, promtool
from reference_pages import NO_QUERIES

from rt.query.monitoring.metrics import metrics_of

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
BLOCKS = [each.partition("```")[0] for each in PAGE.split("```yaml\n")[1:]]
(RULE,) = [yaml.safe_load(each) for each in BLOCKS if "kind: PrometheusRule" in each]
GROUPS: list[dict[str, Any]] = RULE["spec"]["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
CASES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "RtQueryFailed": (
        [('rt_queries{state="failed",', "1x40"), ('rt_queries{state="not running",', "2x40")],
        [('rt_queries{state="failed",', "0x40"), ('rt_queries{state="running",', "9x40")],
    ),
    "RtQueryStageEnded": (
        [('rt_queries_stage_running{stage="s",', "0x40")],
        [('rt_queries_stage_running{stage="s",', "1x40")],
    ),
    "RtQueryDeadLetters": (
        [("rt_queries_dead_letters_total{", "0+1x40")],
        [("rt_queries_dead_letters_total{", "7x40")],
    ),
    "RtQueryOutputFull": (
        [('rt_queries_output_full{output="o",', "1x40")],
        [('rt_queries_output_full{output="o",', "0x40"), ('rt_queries_output_full{output="o",', "0 1 0x38")],
    ),
    "RtQueryNoCheckpoint": (
        [("rt_queries_checkpoint_timestamp_seconds{", "600x40")],
        [("rt_queries_checkpoint_timestamp_seconds{", "0+60x40")],
    ),
    "RtQueryLag": (
        [('rt_queries_source_lag{source="in",', "20000+100x40")],
        [
            ('rt_queries_source_lag{source="in",', "20000x40"),
            ('rt_queries_source_lag{source="in",', "0+9x40"),
        ],
    ),
}
"""For each alert, the series with which it fires at 30 minutes, and the series with which it does not."""


def test_alert_rules_use_only_metrics_and_labels_of_an_engine() -> None:
    known = {each.name: set(each.labels) for each in metrics_of("e", NO_QUERIES)}
    for name, rule in RULES.items():
        asked = names_in(rule["expr"]) - {"deriv"}
        assert asked, name
        assert asked <= set(known), name
        labels = set().union(*(known[each] for each in asked))
        assert labels_in(rule["expr"]) <= labels, name
        for word in ("engine", "state", "stage", "source", "output"):
            if f"$labels.{word}" in rule["annotations"]["summary"]:
                assert word in labels, name
    assert set(RULES) == set(CASES)


@pytest.mark.slow
def test_each_alert_fires_for_its_fault_and_not_without_it(tmp_path: Path) -> None:
    rules, tests = tmp_path / "rules.yaml", tmp_path / "tests.yaml"
    rules.write_text(json.dumps({"groups": GROUPS}))
    done = subprocess.run([promtool(), "check", "rules", rules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    test: dict[str, Any] = {"interval": "1m", "input_series": [], "promql_expr_test": []}
    cases = [(name, *each, at == 0) for name, both in CASES.items() for at in (0, 1) for each in both[at]]
    for number, (name, series, values, is_bad) in enumerate(cases):
        engine = f"case{number}"
        test["input_series"].append({"series": f'{series}engine="{engine}"}}', "values": values})
        expression = f'count(ALERTS{{alertname="{name}",engine="{engine}",alertstate="firing"}}) > bool 0'
        samples = [{"labels": "{}", "value": 1}] if is_bad else []
        test["promql_expr_test"].append({"expr": expression, "eval_time": "30m", "exp_samples": samples})
    tests.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": [test]}))
    done = subprocess.run([promtool(), "test", "rules", tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
