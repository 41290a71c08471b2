"""The README, metadata and install notes of the chart match its values, names and versions."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
import tomllib
from typing import Any

import pytest
from chart_bench import CHART, MATRIX, ROOT, load_yaml, notes, objects, upgrading
from chart_docs import with_table
from click.testing import CliRunner

from rt.cli.main import cli

README = (CHART / "README.md").read_text()
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
WORDS = README + PAGE
META: dict[str, Any] = next(load_yaml((CHART / "Chart.yaml").read_text()))


def test_readme_value_table_matches_values_file(request: pytest.FixtureRequest) -> None:
    wanted = with_table(README, CHART / "values.yaml")
    if request.config.getoption("--rewrite"):
        (CHART / "README.md").write_text(wanted)
    else:
        assert wanted == README


def test_readme_names_only_existing_values() -> None:
    known = json.loads((CHART / "values.schema.json").read_text())["properties"]
    named = re.findall(r"--set '?([\w.\[\]]+)=", WORDS) + re.findall(r"`((?:\w+\.)+\w+)=?[^`]*`", WORDS)
    paths = [name for name in named if name.split(".")[0] in known and name not in {"tls.crt", "tls.key"}]

    assert len(paths) > 20
    for path in paths:
        schema = {"properties": known}
        for word in re.sub(r"\[\d+\]", ".items", path).split("."):
            schema = schema.get("items", {}) if word == "items" else schema["properties"].get(word)
            assert schema is not None, path


def test_readme_commands_use_only_existing_options() -> None:
    shown = re.findall(r"^ *(?:\$ )?rt ([^$\n]*)", PAGE.replace("\\\n", " "), re.MULTILINE)

    groups = {"certs", "member"}
    assert {line.split()[0] for line in shown} == {*groups, "status"}
    for line in shown:
        words = list(itertools.takewhile(str.isalpha, line.split()))[: 2 if line.split()[0] in groups else 1]
        said = CliRunner().invoke(cli, [*words, "--help"]).output
        assert not set(re.findall(r"--[a-z-]+", line)) - set(re.findall(r"--[a-z-]+", said)), line


def test_readme_object_names_match_rendered_names() -> None:
    found = objects({"stream": "trades"})
    names = {each["metadata"]["name"] for each in found}

    for name in ("trades-rt", "trades-rt-headless", "trades-rt-tls-0", "trades-rt-tls-ca"):
        assert f"{name}" in PAGE
        assert name in names


def test_chart_versions_and_license_match_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert META["appVersion"] == META["version"] == project["version"]
    assert META["annotations"]["artifacthub.io/license"] == project["license"]
    for key, text in META["annotations"].items():
        if key.rpartition("/")[2] in {"images", "changes", "recommendations"}:
            assert isinstance(next(load_yaml(text)), list)
        else:
            assert text in {"true", "false"} or key.endswith(("category", "license"))


@pytest.mark.parametrize("values", MATRIX)
def test_notes_render_with_valid_publisher_code_for_each_value_set(values: str) -> None:
    _, found, publisher = notes(values).partition("A first publisher:")

    assert found
    compile(textwrap.dedent(re.findall(r"  with .*\n(?:  .*\n)+", publisher)[0]), "NOTES", "exec")


@pytest.mark.parametrize(
    ("values", "warnings"),
    [
        ("default", ["image.registry"]),
        ("everything", []),
        ("single", ["image.registry", "one node", "podAntiAffinity", "PodDisruptionBudget"]),
        ("no-persistence", ["image.registry", "persistence.enabled", "diagnosticMode"]),
        ("external-nodeport", ["externalAccess.hosts", "image.registry"]),
    ],
)
def test_notes_warn_of_risky_values(values: str, warnings: list[str]) -> None:
    said = [line for line in notes(values).splitlines() if line.startswith("WARNING")]

    assert len(said) == len(warnings)
    for line, warning in zip(said, warnings, strict=True):
        assert warning in line


def test_notes_list_next_steps_after_replica_count_changes() -> None:
    three, five = objects({}), objects({"replicaCount": 5})
    without = {"scaling": {"enabled": False}}

    assert "logs -f" not in notes(upgrading({}, three))
    assert "logs -f" in notes(upgrading({"replicaCount": 5}, three))
    assert "rt member add" in notes(upgrading({"replicaCount": 5, **without}, three))
    fewer = notes(upgrading({}, five))
    assert re.findall(r"delete pvc (\S+)", fewer) == ["data-trades-rt-3", "data-trades-rt-4"]
    assert "no job removes members" not in fewer
    assert "no job removes members" in notes(upgrading(without, five))
    deleted = {"persistence": {"retention": {"whenScaled": "Delete"}}}
    assert "delete pvc" not in notes(upgrading(deleted, five))


def test_notes_list_every_endpoint() -> None:
    found = re.findall(r"^  (\S+:5002)$", notes("default"), re.MULTILINE)

    assert found == [f"trades-rt-{one}.trades-rt-headless.prod.svc.cluster.local:5002" for one in range(3)]
