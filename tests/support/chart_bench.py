"""Renders the chart once for each set of values, and validates objects as Kubernetes and its operators do."""

from __future__ import annotations

import copy
import importlib.resources
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import helm_python
import jsonschema
import yaml
from referencing import Registry, Resource

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "helm"
CRDS: Final = ROOT / "tests" / "testdata" / "helm" / "crds"
MATRIX: Final = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())
VERSIONS: Final = tuple(f"1.{minor}" for minor in range(25, 38))
RELEASE, NAMESPACE = "trades", "prod"

Object: TypeAlias = dict[str, Any]
Values: TypeAlias = Mapping[str, Any]


def load_yaml(text: str) -> Iterator[Any]:
    """Yield each document that is not empty, using the C parser if available."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return (document for document in yaml.load_all(text, Loader=loader) if document is not None)


def values_of(name: str) -> dict[str, Any]:
    """Return the values in a file of the matrix."""
    found: dict[str, Any] = next(load_yaml((CHART / "ci" / f"{name}-values.yaml").read_text()))
    return found


@cache
def _chart(directory: str) -> helm_python.Chart:
    return helm_python.Chart.load(directory)


@cache
def _upgraded_chart() -> helm_python.Chart:
    """Return the chart, with its lookup in the cluster replaced by the value `global.installed`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(shutil.copytree(CHART, Path(directory) / "rt"))
        lookup = path / "templates" / "_installed.tpl"
        assert "lookup" in lookup.read_text()
        lookup.write_text('{{- define "rt.installed" -}}{{ .Values.global.installed | toJson }}{{- end -}}')
        return helm_python.Chart.load(path)


@cache
def _rendered(values: str, release: str) -> Mapping[str, str]:
    said = json.loads(values)
    chart = _upgraded_chart() if "installed" in said.get("global", {}) else _chart(str(CHART))
    return chart.render(said, name=release, namespace=NAMESPACE)


def upgrading(values: Values, before: list[Object]) -> dict[str, Any]:
    """Return the values for an upgrade of a release whose objects are `before`. All functions of this module
    accept them.
    """
    found = one(before, "StatefulSet")
    name = found["metadata"]["name"]
    (settings,) = [
        each["data"][f"{name}-0.toml"] for each in before if each["metadata"]["name"] == f"{name}-config"
    ] or [""]
    installed = {"replicas": found["spec"]["replicas"], "settings": settings}
    return {**values, "global": {**values.get("global", {}), "installed": installed}}


def rendered(values: Values | str, *, release: str = RELEASE) -> Mapping[str, str]:
    """Return each rendered template by name. `values` is the name of a file of the matrix, or the values."""
    said = values_of(values) if isinstance(values, str) else values
    return _rendered(json.dumps(said, sort_keys=True), release)


def notes(values: Values | str) -> str:
    """Return the notes that the chart shows to the user who installs it."""
    return rendered(values)["rt/templates/NOTES.txt"]


def objects(values: Values | str, *, release: str = RELEASE) -> list[Object]:
    """Return the rendered objects, as a copy that may be changed."""
    said = values_of(values) if isinstance(values, str) else values
    return copy.deepcopy(_objects(json.dumps(said, sort_keys=True), release))


@cache
def _objects(values: str, release: str) -> list[Object]:
    texts = _rendered(values, release)
    return [each for name, text in texts.items() if name.endswith(".yaml") for each in load_yaml(text)]


def one(found: list[Object], kind: str, name: str | None = None) -> Object:
    """Return the only object of this kind, and of this name if given."""
    (only,) = [
        each for each in found if each["kind"] == kind and (name is None or each["metadata"]["name"] == name)
    ]
    return only


def refusal(values: Values) -> str:
    """Return why the chart does not render these values; empty if it does."""
    try:
        _rendered(json.dumps(values, sort_keys=True), RELEASE)
    except helm_python.HelmError as error:
        return str(error)
    return ""


# Validation


def problems(found: Object, version: str) -> list[str]:
    """Return why Kubernetes of this version, or the operator that defines the kind, would reject the object.
    Validation is strict.
    """
    return _problems(json.dumps(found), "" if _own_kind(found["kind"]) else version)


@cache
def _problems(text: str, version: str) -> list[str]:
    """Cached by object, because most objects are the same in many sets of values."""
    found = json.loads(text)
    validator = _own_kind(found["kind"]) or _validator(found["apiVersion"], found["kind"], version)
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(found)]


@cache
def _own_kind(kind: str) -> Any:
    path = CRDS / f"{kind}.json"
    return jsonschema.Draft202012Validator(json.loads(path.read_text())) if path.exists() else None


@cache
def _validator(api: str, kind: str, version: str) -> Any:
    group, _, number = api.rpartition("/")
    words = [kind.lower(), *([group.split(".")[0]] if group else []), number]
    schema = json.loads((_schemas(version) / f"{'-'.join(words)}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    content = json.loads((_schemas(version) / "_definitions.json").read_text())
    return Resource.from_contents(content) @ Registry()


def _schemas(version: str) -> Any:
    package = importlib.resources.files("kubernetes_validate")
    return package / "kubernetes-json-schema" / f"v{version}.0-local-strict"
