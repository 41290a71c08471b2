"""The Dockerfile is checked without a container engine, and its build steps make a working environment."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from chart_bench import CHART, ROOT, objects, one
from dockerfile import read_dockerfile
from packaging.requirements import Requirement

ARGUMENTS, (BUILD, FINAL) = read_dockerfile(CHART / "Dockerfile")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("archiver", "pyspark_rt", "replicator", "rt", "sequencer")


def copied() -> list[str]:
    return [source for rest in BUILD.of("COPY") for source in rest.split()[:-1]]


def test_base_image_is_pinned_and_same_in_both_stages() -> None:
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", ARGUMENTS["PYTHON"])
    assert BUILD.base == FINAL.base == ARGUMENTS["PYTHON"]
    assert "latest" not in (CHART / "Dockerfile").read_text()


def test_copied_paths_exist_and_are_not_ignored() -> None:
    lines = (CHART / "Dockerfile.dockerignore").read_text().splitlines()
    let_in = [line.removeprefix("!") for line in lines if line.startswith("!")]

    for path in copied():
        assert (ROOT / path).exists(), path
        assert any(fnmatch(path, each) for each in let_in), path
    assert [package for package in PACKAGES if package not in copied()] == []
    assert FINAL.of("COPY") == ["--from=build /opt/rt /opt/rt"]


def test_image_user_matches_chart_security_context() -> None:
    security = one(objects("default"), "StatefulSet")["spec"]["template"]["spec"]["securityContext"]

    assert FINAL.one("USER") == f"{security['runAsUser']}:{security['runAsGroup']}" == "10001:10001"
    assert "--uid 10001" in FINAL.of("RUN")[-1]


def test_image_entry_point_is_rt_and_its_ports_match_chart() -> None:
    assert FINAL.command("ENTRYPOINT") == ["rt"]
    assert FINAL.command("CMD")[0] == "node"
    assert "rt" in PROJECT["scripts"]
    (container,) = one(objects("default"), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    ports = {str(port["containerPort"]) for port in container["ports"]}
    assert set(FINAL.one("EXPOSE").split()) == ports
    assert FINAL.one("VOLUME") in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["command"][0] == "rt"


def test_image_has_health_check_and_labels() -> None:
    check = FINAL.one("HEALTHCHECK")
    assert "/liveness" in check
    compile(re.findall(r'"([^"]*)"\]$', check)[0], "healthcheck", "exec")
    assert {"title", "description", "licenses", "version", "revision"} <= {
        label for rest in FINAL.of("LABEL") for label in re.findall(r"opencontainers\.image\.(\w+)=", rest)
    }
    assert f"VERSION={PROJECT['version']}" in FINAL.of("ARG")


def test_final_stage_has_no_compiler_or_installer() -> None:
    removed, *others = FINAL.of("RUN")

    assert removed.startswith("python -m pip uninstall")
    assert removed.endswith("setuptools wheel pip"), "the base has them"
    assert not re.search(r"pip|apt|gcc|build-essential", " ".join(others))
    assert "--without-pip /opt/rt" in BUILD.of("RUN")[0]


def test_every_dependency_is_locked_with_hash() -> None:
    text = (CHART / "requirements.lock").read_text()
    locked = re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE)

    wanted = {re.match(r"[A-Za-z0-9-]+", each)[0].lower() for each in PROJECT["dependencies"]}  # type: ignore[index]
    assert wanted <= set(locked)
    for name, version in re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE):
        for each in map(Requirement, PROJECT["dependencies"]):
            assert each.name != name or each.specifier.contains(version), (name, version)
    for block in re.split(r"\n(?=\S)", text.strip()):
        assert "--hash=sha256:" in block, block
    assert "://" not in text


FETCHING = re.compile("--require-hashes")
"""The steps that download the locked packages. They take 20 s of processor time, mostly for the pages of the
index.
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [False, True], ids=["what_is_ours", "with_all_that_is_locked"])
def test_build_steps_make_environment_with_working_entry_point(is_whole: bool, tmp_path: Path) -> None:
    if is_whole and not os.environ.get("RT_IMAGE"):
        pytest.skip("RT_IMAGE=1 has it fetch all that is locked, as the image does")
    places = {"/opt/rt": tmp_path / "rt", "/opt/build": tmp_path / "build", "/src": tmp_path / "src"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    # The image compiles packages ahead of time. Here that would only cost time.
    environment |= {"PATH": f"{tmp_path / 'bin'}:{environment['PATH']}", "PIP_COMPILE": "0"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)

    for word, rest in BUILD.steps:
        if word == "COPY":
            *paths, target = rest.split()
            for path in paths:
                copy_in(path, places["/src"] / target)
        elif word == "RUN" and FETCHING.search(rest) and not is_whole:
            for venv, lock in (("/opt/rt", "requirements.lock"), ("/opt/build", "build.lock")):
                lend_packages(places[venv], CHART / lock)
        elif word == "RUN":
            command = re.sub("/opt/rt|/opt/build|/src", lambda found: str(places[found[0]]), rest)
            run(["sh", "-c", command], cwd=places["/src"], env=environment)

    shutil.rmtree(places["/src"])  # The program must run from the installed files.
    python, entry = (str(places["/opt/rt"] / "bin" / word) for word in ("python", "rt"))
    clean = {"PATH": environment["PATH"]}
    assert FINAL.command("ENTRYPOINT") == ["rt"]
    assert "--bootstrap" in run([entry, *FINAL.command("CMD")], cwd=tmp_path, env=clean)
    where = run([python, "-c", "import rt; print(rt.__file__)"], cwd=tmp_path, env=clean)
    assert where.startswith(str(places["/opt/rt"]))
    assert not (places["/opt/rt"] / "bin" / "pip").exists()


def lend_packages(venv: Path, lock: Path) -> None:
    """Link the locked packages that these tests have into `venv`, instead of downloading them."""
    (site,) = venv.glob("lib/python3*/site-packages")
    for name in re.findall(r"^([a-z0-9-]+)==", lock.read_text(), re.MULTILINE):
        with contextlib.suppress(PackageNotFoundError):  # The package is for another platform.
            found = distribution(name)
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(found.locate_file(top))


def copy_in(path: str, target: Path) -> None:
    """Copy as COPY does: the contents of a directory into the target, a file into a directory."""
    target.mkdir(parents=True, exist_ok=True)
    if (ROOT / path).is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / path, target, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(ROOT / path, target)


def run(command: list[str], *, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout
