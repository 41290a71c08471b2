"""Compares the metrics in dashboards and alert rules with the metrics of nodes and stream hosts."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from page_bench import busy_node

from rt.streams.core.metrics import metrics_of as stream_metrics_of
from sequencer.rest.views.node_metrics import metrics_of

HELM: Final = Path(__file__).parents[2] / "helm"
_WORDS: Final = frozenset(
    {
        "and",
        "or",
        "unless",
        "by",
        "without",
        "on",
        "ignoring",
        "sum",
        "min",
        "max",
        "count",
        "rate",
        "increase",
    }
    | {
        "time",
        "floor",
        "abs",
        "histogram_quantile",
        "bool",
        "avg",
        "label_values",
        "last_over_time",
        "group_left",
        "group_right",
        "min_over_time",
        "max_over_time",
        "offset",
        "vector",
    }
)


@cache
def node_metrics() -> dict[str, tuple[str, ...]]:
    """Return each metric name of a node, with its labels. The result must not be changed."""
    found: dict[str, tuple[str, ...]] = {}
    for metric in metrics_of(busy_node()):
        if metric.kind == "histogram":
            found[f"{metric.name}_bucket"] = (*metric.labels, "le")
            found |= {f"{metric.name}_{part}": metric.labels for part in ("sum", "count")}
        else:
            found[metric.name] = metric.labels
    return found


@cache
def stream_metrics() -> dict[str, tuple[str, ...]]:
    """Return each metric name of a stream host, with its labels. The result must not be changed."""
    return {metric.name: tuple(metric.labels) for metric in stream_metrics_of("", "", [])}


@cache
def known_metrics() -> dict[str, tuple[str, ...]]:
    """Return the metrics of nodes and of stream hosts."""
    return {**node_metrics(), **stream_metrics()}


def names_in(expression: str) -> set[str]:
    """Return the metrics in an expression: every word that is no operator, function, label or string."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]|\{[^}]*\}', " ", expression)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"\b[a-z_][a-z0-9_]*\b", bare)) - _WORDS


def labels_in(expression: str) -> set[str]:
    """The labels that an expression selects or groups by."""
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    grouped = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression)
    return {*selected, *(label.strip() for group in grouped for label in group.split(",") if label.strip())}


def check_names(expression: str, *, where: str) -> None:
    """Assert that an expression uses existing metrics, with their labels or labels that Prometheus adds."""
    known = known_metrics()
    names = names_in(expression)
    assert names, where
    assert names <= set(known), (where, names - set(known))
    labels = {label for name in names for label in known[name]} | {"namespace", "job", "instance"}
    assert labels_in(expression) <= labels, (where, labels_in(expression) - labels)


def promtool() -> str:
    """Return the path of the program. Skip the test if there is none."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool here: on Debian, apt-get install prometheus")
    return found
