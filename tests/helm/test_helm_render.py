"""Objects rendered from every value set fit the strict schemas of Kubernetes 1.25 to 1.37."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import helm_python
import pytest
import yaml
from chart_bench import CHART, MATRIX, VERSIONS, load_yaml, objects, one, problems, rendered
from chart_rules import RULES, pods_of


@pytest.mark.parametrize("values", MATRIX)
def test_rendered_objects_fit_kubernetes_schemas(values: str) -> None:
    versions = VERSIONS if values == "default" else VERSIONS[::4]

    for found in objects(values):
        for version in versions:
            is_newer = found["kind"] == "Service" and "trafficDistribution" in found["spec"]
            if not (is_newer and version < "1.30"):
                where = f"{version} {found['kind']} {found['metadata']['name']}"
                assert problems(found, version) == [], where


@pytest.mark.parametrize("values", MATRIX)
def test_rendered_objects_break_no_rule_between_objects(values: str) -> None:
    found = objects(values)

    assert [broken for rule in RULES for broken in rule(found)] == []


@pytest.mark.parametrize("values", MATRIX)
def test_rendered_objects_are_namespaced_and_uniquely_named(values: str) -> None:
    found = objects(values)
    names = [(each["kind"], each["metadata"]["name"]) for each in found]

    assert len(set(names)) == len(names)
    kinds = {kind for kind, _ in names}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding", "Namespace", "CustomResourceDefinition"}


def test_schema_check_reports_unknown_field() -> None:
    found = objects("everything")
    service, monitor = one(found, "Service", "trades-stream"), one(found, "ServiceMonitor")
    service["spec"]["typo"] = monitor["spec"]["typo"] = 1

    assert problems(service, "1.30") != []
    assert problems(monitor, "1.30") != []


@pytest.mark.parametrize("values", ["default", "cert-manager", "everything"])
def test_helm_lint_reports_no_errors(values: str) -> None:
    said = yaml.safe_load((CHART / "ci" / f"{values}-values.yaml").read_text())

    report = helm_python.lint(str(CHART), said, strict=True, kube_version="v1.29.0")

    assert report["errors"] == []
    assert [one["error"] for one in report["messages"] if "icon" not in one["error"]] == []


def test_object_names_fit_kubernetes_length_limits_for_any_release_name() -> None:
    for release in ("a", "rt", "a" * 53):
        for found in objects("default", release=release):
            name = found["metadata"]["name"]
            assert len(name) <= (52 if found["kind"] == "CronJob" else 63), name


def test_rendering_twice_gives_same_output() -> None:
    again = helm_python.Chart.load(CHART).render({}, name="trades", namespace="prod")

    assert again == rendered({})


def test_chart_package_contains_needed_files_without_development_files(tmp_path: Path) -> None:
    path = helm_python.package(str(CHART), destination=str(tmp_path))

    with tarfile.open(path) as archive:
        names = {name.removeprefix("rt/") for name in archive.getnames()}
    wanted = {"Chart.yaml", "values.yaml", "values.schema.json", "README.md"}
    assert (
        wanted
        | {"dashboards/rt.json", "alerts/rt.rules.yaml", "files/scale.py", "templates/statefulset.yaml"}
        <= names
    )
    assert not [name for name in names if name.startswith(("ci/", "Dockerfile", "requirements", ".c", ".y"))]


def test_rendered_alerts_and_dashboards_match_their_files() -> None:
    found = objects("everything")
    files = next(load_yaml((CHART / "alerts" / "rt.rules.yaml").read_text()))
    wanted = {rule["alert"]: rule for group in files["groups"] for rule in group["rules"]}

    made = [rule for group in one(found, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in made} == set(wanted) - {"RtMergeLag"}
    for rule in made:
        assert rule["labels"] == wanted[rule["alert"]]["labels"] | {"team": "data"}
        assert rule["expr"] == wanted[rule["alert"]]["expr"]
        assert rule["annotations"] == wanted[rule["alert"]]["annotations"]
    boards = one(found, "ConfigMap", "trades-stream-dashboard")["data"]
    assert set(boards) == {"rt.json", "rt-streams.json"}
    for name, board in boards.items():
        assert json.loads(board) == json.loads((CHART / "dashboards" / name).read_text())


def test_user_supplied_values_appear_in_rendered_objects() -> None:
    found = objects("everything")
    template = one(found, "StatefulSet")["spec"]["template"]
    (node, sidecar) = template["spec"]["containers"]

    for where, other in pods_of(found):
        for key in ("nodeSelector", "tolerations", "runtimeClassName", "schedulerName", "dnsConfig"):
            assert other["spec"][key] == template["spec"][key] != {}, (where, key)
    assert template["spec"]["shareProcessNamespace"]
    assert (sidecar["name"], template["spec"]["initContainers"][0]["name"]) == ("sidecar", "first")
    assert {"name": "EXTRA", "value": "trades"} in node["env"]
    assert node["args"] == ["--log-level", "debug"]
    assert template["metadata"]["annotations"]["example.com/release"] == "trades"
    assert one(found, "ConfigMap", "trades-extra")
    assert one(found, "ConfigMap", "trades-text")
    spread = template["spec"]["topologySpreadConstraints"]
    assert [each["labelSelector"]["matchLabels"].get("own") for each in spread] == [None, "selector"]
    assert node["image"].startswith("registry.example.com/rt@sha256:")
