"""Every code block of README and docs runs, parses or fits its schema, some on a real cluster.

The `python` and `console` blocks of a page run in order, in a temporary directory. For the pages in
`ON_A_CLUSTER`, blocks with the mark `cluster` run on real nodes. There `node1:5002` stands for the endpoint
of a node, `/var/lib` and `/etc/rt` for directories, and `NAME.crt` for a certificate, whose name gives its
role. For other pages, the test compiles these blocks, runs their imports and parses their `rt` command lines.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from doc_blocks import (
    MARKS,
    ROOT,
    RUNNER,
    SHELL,
    Block,
    blocks,
    check_rt_command,
    pages,
    rt_commands,
    shell_problem,
)
from spark_sessions import cheap_environment

from rt.net.identity import Role
from sequencer.config.config import DATA_PORT
from sequencer.config.config_loader import KEYS, build_config, from_file
from sequencer.localcluster.loopback import choose_ports, free_ports
from sequencer.localcluster.nodes import LocalCluster

PAGES = pages()
BLOCKS = [block for page in PAGES for block in blocks(page)]
TIMEOUT_S = 300

ON_A_CLUSTER = ("README.md", "docs/event-time.md", "docs/quickstart.md")
"""Pages whose blocks with the mark `cluster` are run."""


def each(*languages: str) -> pytest.MarkDecorator:
    found = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", found, ids=[block.where for block in found])


def runnable(page: str, *, with_cluster: bool) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if block.language in {"python", "console"}
        and block.is_runnable()
        and (with_cluster or not block.needs_cluster)
    ]


def run(found: list[Block], directory: Path, texts: list[str] | None = None) -> None:
    """Run the blocks in a separate process; at the end, kill all processes that they started."""
    directory.mkdir(exist_ok=True)
    if (ROOT / "examples").is_dir():
        (directory / "examples").symlink_to(ROOT / "examples")
    contents = [
        (
            block.where,
            block.language,
            text if block.language == "python" else Block(*_with_text(block, text)).commands(),
        )
        for block, text in zip(found, texts or [block.text for block in found], strict=True)
    ]
    is_spark = any("SparkSession" in text for _, _, text in contents)
    given = cheap_environment(directory) if is_spark else os.environ
    environment = {key: value for key, value in given.items() if not key.startswith("RT_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER],
        cwd=directory,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(json.dumps(contents), timeout=TIMEOUT_S)
    finally:
        with_group_killed(process)
    assert process.returncode == 0, output


def _with_text(block: Block, text: str) -> tuple[str, int, str, frozenset[str], str]:
    return block.page, block.line, block.language, block.marks, text


def with_group_killed(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page, with_cluster=False)])
def test_code_blocks_of_page_run(page: str, tmp_path: Path) -> None:
    run(runnable(page, with_cluster=False), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in ON_A_CLUSTER if page in PAGES and any(b.needs_cluster for b in blocks(page))]
)
def test_code_blocks_of_page_run_on_cluster(page: str, tmp_path: Path) -> None:
    found = runnable(page, with_cluster=True)
    if any("rt node" in block.text or "rt dev" in block.text for block in found):
        # The page starts its own nodes.
        texts = write_node_settings(page, found, tmp_path / "w")
        run(found, tmp_path / "w", texts)
        return
    with LocalCluster(tmp_path / "c", stream="trades") as cluster:
        cluster.start()
        texts = [on_cluster(block.text, cluster, tmp_path / "w") for block in found]
        run(found, tmp_path / "w", texts)


def write_node_settings(page: str, found: list[Block], directory: Path) -> list[str]:
    """Assign free ports to everything on the page, and write them where `rt node` and `rt dev` find them."""
    settings = [block.text for block in blocks(page) if block.language == "toml"]
    used = sorted(
        set(re.findall(r"127\.0\.0\.1:(\d+)", "\n".join([*settings, *(one.text for one in found)])))
    )
    ports = dict(zip(used, free_ports(len(used)), strict=True))

    def moved(text: str) -> str:
        return re.sub(r"127\.0\.0\.1:(\d+)", lambda match: f"127.0.0.1:{ports[match[1]]}", text)

    directory.mkdir()
    for text in settings:
        if name := tomllib.loads(text).get("name"):
            quiet = "rest_port = 0\nhealth_port = 0\n"
            (directory / f"{name}.toml").write_text(quiet + moved(text))
    if any("rt dev" in block.text for block in found):
        nodes = [f"n{number}" for number in range(1, 4)]
        own = {name: choose_ports([name], with_rest=True)[name] for name in nodes}
        known = {name: ports[str(DATA_PORT + at)] for at, name in enumerate(nodes)}
        saved = {name: own[name]._replace(data=known[name], health=0) for name in nodes}
        (directory / "rt-dev").mkdir()
        (directory / "rt-dev" / "cluster.json").write_text(json.dumps({"stream": "dev", "ports": saved}))
    return [moved(block.text) for block in found]


def on_cluster(text: str, cluster: LocalCluster, directory: Path) -> str:
    """The text with endpoints, directories and certificates of `cluster`."""
    directory.mkdir(exist_ok=True)
    for number, endpoint in enumerate(cluster.endpoints, 1):
        text = re.sub(rf"\bn(ode)?{number}(\.example)?:5002\b", endpoint, text)
    for name in set(re.findall(r"([\w-]+)\.crt\b", text)) - {"ca"}:
        if not (directory / f"{name}.crt").exists():
            tls = cluster.certificate(_role(name), name, dedup_ids=[name])
            for source, target in ((tls.ca, "ca.crt"), (tls.cert, f"{name}.crt"), (tls.key, f"{name}.key")):
                (directory / target).write_bytes(Path(source).read_bytes())
    return re.sub(r"/var/lib\b|/etc/rt\b", str(directory), text)


def _role(name: str) -> Role:
    roles: dict[str, Role] = {
        "op": "operator",
        "reader": "subscriber",
        "sub": "subscriber",
        "spark": "subscriber",
    }
    return next((role for start, role in roles.items() if name.startswith(start)), "publisher")


@pytest.mark.parametrize("page", PAGES)
def test_code_block_marks_are_known(page: str) -> None:
    for block in blocks(page):
        assert block.marks <= MARKS, block.where


@each("python")
def test_python_blocks_compile_and_their_imports_exist(block: Block) -> None:
    for statement in ast.walk(compile(block.text, block.where, "exec", ast.PyCF_ONLY_AST)):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                importlib.import_module(alias.name)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            module = importlib.import_module(statement.module)
            for alias in statement.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{statement.module}.{alias.name}")


@each(*SHELL)
def test_shell_blocks_are_well_formed_and_their_rt_commands_exist(block: Block) -> None:
    commands = block.commands()
    assert commands, block.where
    for command in commands:
        assert shell_problem(command) == ""
        for words in rt_commands(command):
            check_rt_command(words)
        for script in re.findall(r"(?:^|\s)(\.ci/\w+)", command):
            assert (ROOT / script).exists(), f"{block.where}: {script}"


@each("toml")
def test_toml_blocks_parse_and_their_node_settings_are_valid(block: Block, tmp_path: Path) -> None:
    found = tomllib.loads(block.text)
    if found.keys() & KEYS.keys():
        path = tmp_path / "node.toml"
        path.write_text(block.text)
        said = from_file(str(path))
        if {"stream", "name", "directory", "members", "ca", "cert", "key"} <= said.keys():
            build_config(said)
        else:
            for key, one in said.items():
                KEYS[key](one)


@each("yaml")
def test_yaml_blocks_parse_and_their_chart_values_fit_schema(block: Block) -> None:
    schema = json.loads((ROOT / "helm" / "values.schema.json").read_text())
    for document in yaml.safe_load_all(block.text):
        if (
            isinstance(document, dict)
            and "kind" not in document
            and document.keys() & schema["properties"].keys()
        ):
            jsonschema.validate(document, {**schema, "required": []})


@each("json")
def test_json_blocks_parse(block: Block) -> None:
    json.loads(block.text)


def test_command_check_rejects_unknown_commands_and_options() -> None:
    for line in ("rt pub --endpoint n1:1", "rt publish", "rt log dmp x", "rt --loglevel=info status"):
        with pytest.raises(Exception, match=r"(?i)no such|no command"):
            check_rt_command(line.split())
    check_rt_command(
        ["rt", "--log-level", "debug", "certs", "issue", "pki", "--role", "node", "--name", "n1"]
    )


def test_rt_commands_are_found_in_pipes_and_substitutions() -> None:
    line = (
        "X=1 printf 'a|b' | rt pub --path d && kubectl exec pod -- rt status --json > out; echo $(rt sub d)"
    )
    assert [words[:2] for words in rt_commands(line)] == [["rt", "pub"], ["rt", "status"], ["rt", "sub"]]
