"""The repository itself: what README and pyproject say is true of the tree."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {contract["name"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def test_every_file_that_the_readme_names_exists() -> None:
    named = re.findall(r"`((?:rt|sequencer|tests|\.ci)/[\w./-]+|pyproject\.toml)`", README)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_command_that_the_readme_names_exists() -> None:
    from rt.cli.main import main

    commands = PYPROJECT["project"]["entry-points"]["rt.commands"]
    named = set(re.findall(r"`rt ([a-z]+)", README))
    assert named
    assert named <= set(commands)
    assert callable(main)


def test_every_entry_point_loads() -> None:
    for target in PYPROJECT["project"]["entry-points"]["rt.commands"].values():
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_two_contracts_on_pure_modules_name_the_same_ones() -> None:
    decide = CONTRACTS["Pure modules decide: no files, clocks, threads or randomness"]
    lean = CONTRACTS["Pure modules lean only on pure modules"]
    assert decide["source_modules"] == lean["source_modules"]
    for module in decide["source_modules"]:
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module


def test_the_version_is_the_same_everywhere() -> None:
    import rt

    assert rt.__version__ == PYPROJECT["project"]["version"]


def test_every_dependency_says_why_it_is_one() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("\ndependencies = [") : text.index("[project.optional-dependencies]")]
    lines = [line for line in block.splitlines() if line.strip().startswith('"')]
    assert lines
    assert all("# " in line for line in lines)


def test_nothing_generated_is_committed() -> None:
    assert [
        name for name in tracked() if re.search(r"\.(pyc|so|egg-info)(/|$)|__pycache__|\.venv/", name)
    ] == []


def test_the_scripts_can_be_run() -> None:
    for name in ("setup", "demo", "test", "run"):
        path = ROOT / ".ci" / name
        assert path.stat().st_mode & 0o111
        subprocess.run(["sh", "-n", path], check=True)


def test_the_package_is_typed_and_importable_as_a_module() -> None:
    assert (ROOT / "rt" / "py.typed").exists()
    done = subprocess.run(
        [sys.executable, "-m", "rt", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert PYPROJECT["project"]["version"] in done.stdout
