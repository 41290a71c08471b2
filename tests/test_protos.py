"""What `.ci/protos` makes of the protocol files is what is committed, and it can be used."""

from __future__ import annotations

import importlib
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROTOS = sorted(path.stem for path in (ROOT / "proto" / "rt" / "v1").glob("*.proto"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def made(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*_pb2*")}


def test_what_is_committed_is_what_the_protocol_files_make(tmp_path: Path) -> None:
    subprocess.run([ROOT / ".ci" / "protos", tmp_path], check=True)
    fresh = made(tmp_path / "rt" / "v1")
    assert len(fresh) == 3 * len(PROTOS) > 0
    committed = made(ROOT / "rt" / "v1")
    assert sorted(committed) == sorted(fresh), "run .ci/protos"
    assert [name for name in fresh if committed[name] != fresh[name]] == [], "run .ci/protos"


@pytest.mark.parametrize("name", PROTOS)
def test_what_was_made_loads(name: str) -> None:
    importlib.import_module(f"rt.v1.{name}_pb2")
    importlib.import_module(f"rt.v1.{name}_pb2_grpc")


def test_the_generator_is_pinned_to_the_least_grpc_that_runs_what_it_makes() -> None:
    least = next(name for name in PYPROJECT["project"]["dependencies"] if name.startswith("grpcio>="))
    assert least.replace("grpcio>=", "grpcio-tools==") in PYPROJECT["dependency-groups"]["test"]
    generated = (ROOT / "rt" / "v1" / f"{PROTOS[0]}_pb2_grpc.py").read_text()
    assert f"GRPC_GENERATED_VERSION = '{least.removeprefix('grpcio>=')}'" in generated


def test_the_floor_of_protobuf_is_what_the_generated_code_demands() -> None:
    generated = (ROOT / "rt" / "v1" / f"{PROTOS[0]}_pb2.py").read_text()
    (line,) = [line for line in generated.splitlines() if line.startswith("# Protobuf Python Version: ")]
    floor = f"protobuf>={line.removeprefix('# Protobuf Python Version: ')}"
    assert any(name.startswith(f"{floor},") for name in PYPROJECT["project"]["dependencies"])


def test_the_directory_of_protocol_files_is_no_package() -> None:
    assert not list((ROOT / "proto").rglob("*.py"))
