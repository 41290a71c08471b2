"""Checks that README, docs and pyproject agree with the tree, and that modules and classes stay small."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
WORDS = "\n".join([README, *PAGES.values()])
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {contract["name"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def product_modules() -> list[str]:
    made = r"(rt|replicator|sequencer|archiver)/(?!v1/).*\.py$"
    found = [path for path in tracked() if re.match(made, path)]
    assert len(found) > 400
    return found


def test_files_named_in_readme_and_docs_exist() -> None:
    folders = r"rt|replicator|sequencer|archiver|pyspark_rt|proto|helm|tests|examples|docs|\.ci"
    named = re.findall(rf"`((?:{folders})/[\w./-]+|pyproject\.toml)`", WORDS)
    assert len(named) > 100
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readme_has_at_most_150_lines_and_its_linked_files_exist() -> None:
    generated = {"cli.md", "configuration.md", "rest-api.md", "metrics.md", "python-api.md"}
    assert len(README.splitlines()) <= 150
    links = set(re.findall(r"\]\((?!http)([^)#]+)", README))
    assert links
    assert [link for link in links if not (ROOT / link).exists() and Path(link).name not in generated] == []


def test_commands_named_in_readme_and_docs_exist() -> None:
    from rt.cli.main import main

    commands = PYPROJECT["project"]["entry-points"]["rt.commands"]
    named = set(re.findall(r"`rt ([a-z]+)", WORDS))
    assert named
    assert named <= set(commands)
    assert callable(main)


def test_every_entry_point_loads() -> None:
    for target in PYPROJECT["project"]["entry-points"]["rt.commands"].values():
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_project_metadata_is_complete_and_classifiers_are_valid() -> None:
    from trove_classifiers import classifiers

    project = PYPROJECT["project"]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= set(project["urls"])
    assert set(project["classifiers"]) <= classifiers
    assert project["keywords"] == sorted(project["keywords"])
    assert len(project["description"]) < 200
    least = project["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in project["classifiers"]


def test_files_included_in_wheel_exist() -> None:
    files = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_dependency_group_test_includes_docs_and_dev_includes_test() -> None:
    groups = PYPROJECT["dependency-groups"]
    assert {"include-group": "docs"} in groups["test"]
    assert {"include-group": "test"} in groups["dev"]


def test_modules_named_in_import_contracts_exist() -> None:
    named = {name for contract in CONTRACTS.values() for name in contract.get("source_modules", [])}
    assert len(named) > 10
    for name in named:
        path = ROOT / name.removesuffix(".*").replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name


def test_package_version_matches_pyproject() -> None:
    import rt

    assert rt.__version__ == PYPROJECT["project"]["version"]


def test_every_dependency_line_has_a_comment() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("\ndependencies = [") : text.index("[project.optional-dependencies]")]
    lines = [line for line in block.splitlines() if line.strip().startswith('"')]
    assert lines
    assert all("# " in line for line in lines)


def test_build_artifacts_are_not_committed() -> None:
    assert [
        name for name in tracked() if re.search(r"\.(pyc|so|egg-info)(/|$)|__pycache__|\.venv/", name)
    ] == []


def test_ci_scripts_are_executable_and_valid_shell() -> None:
    for name in ("setup", "demo", "test", "run"):
        path = ROOT / ".ci" / name
        assert path.stat().st_mode & 0o111
        subprocess.run(["sh", "-n", path], check=True)


def test_package_has_py_typed_and_module_run_prints_version() -> None:
    assert (ROOT / "rt" / "py.typed").exists()
    done = subprocess.run(
        [sys.executable, "-m", "rt", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert PYPROJECT["project"]["version"] in done.stdout


def test_runbook_covers_every_alarm_and_alert() -> None:
    page = PAGES["alerts-runbook.md"]
    alarms = re.findall(r'Alarm\(\s*"([a-z-]+)"', (ROOT / "sequencer/rest/views/alarms.py").read_text())
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "helm/alerts/rt.rules.yaml").read_text())
    assert len(alarms) > 10
    assert len(alerts) > 15
    assert [name for name in alarms if f"\n## {name}\n" not in page] == []
    assert [name for name in alerts if f"\n| `{name}` | " not in page] == []


RIDDLES = re.compile(
    r"^(all|as|how|it|no|not|nothing|of|one|so|that|there|they|what|where|who)_"
    r"|_(anew|gone|lacks|mends?|nobody|said|says|tells|told|wants|whatever|who|whoever|whom|whose)(_|$)"
)


def test_test_names_start_with_their_subject_and_use_plain_words() -> None:
    names = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def test_(\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert len(names) > 1000
    assert sorted(filter(RIDDLES.search, names)) == []


def test_tests_named_in_docs_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", WORDS))
    assert len(named) > 20
    assert sorted(name for name in named if f"def {name}(" not in sources) == []


PUBLIC_CLASSES = {"Publisher": 350, "Subscriber": 360}
"""Maximum lines of each class. Their arguments are options that programs set by name, each with a
description.
"""


MODULE_LINES_MAX = 400


def test_modules_classes_constructors_and_folders_stay_within_size_limits() -> None:
    """Code that exceeds a limit contains a second idea: split it there."""
    modules = product_modules()
    folders = Counter(str(Path(path).parent) for path in modules if Path(path).name != "__init__.py")
    too_large = [f"{folder}: {count} modules" for folder, count in folders.items() if count > 15]
    for path in modules:
        text = (ROOT / path).read_text()
        if (count := text.count("\n")) > MODULE_LINES_MAX:
            too_large.append(f"{path}: {count} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > PUBLIC_CLASSES.get(node.name, 350):
                    too_large.append(f"{path}: class {node.name} has {lines} lines")
                arguments = _count_arguments(node)
                if arguments > 10 and node.name not in PUBLIC_CLASSES:
                    too_large.append(f"{path}: {node.name}.__init__ has {arguments} arguments")
    assert too_large == []


SAME_MEANING = {"DeadLetter", "Publisher", "StreamTracing", "Subscriber"}
"""Twins in `rt.aio`, a protocol and its implementation, and dead letters of both streams and queries."""


def test_public_class_names_are_unique_except_listed_ones() -> None:
    found: dict[str, list[str]] = {}
    for path in product_modules():
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name not in SAME_MEANING} == {}


def _count_arguments(node: ast.ClassDef) -> int:
    made = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    return sum(len(one.args.args[1:]) + len(one.args.kwonlyargs) for one in made)
