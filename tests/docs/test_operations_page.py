"""The procedures in docs/operations.md work: three nodes on one machine, backup, member changes."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import ROOT, RUNNER, blocks
from growing_cluster import GrowingCluster
from log_items import messages

import rt
from rt.log.check.compare import compare
from rt.log.check.verify import verify
from rt.net.rest_client import ask
from sequencer.leader import member_steps
from sequencer.localcluster.loopback import free_ports
from sequencer.localcluster.nodes import LocalCluster
from sequencer.localcluster.processes import nothing_left

pytestmark = pytest.mark.slow
PAGE = "docs/operations.md"
WAIT_S = 120


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path, for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


def test_commands_of_page_start_three_nodes_on_one_machine(root: Path) -> None:
    found = [block for block in blocks(PAGE) if re.search(r"^\$ rt node ", block.text, re.MULTILINE)]
    assert len(found) == 2, "one writes the files, one starts the nodes"
    port = re.compile(r"(127\.0\.0\.1:|-port )(\d+)")
    used = sorted({match[2] for block in found for match in port.finditer(block.text)})
    assert len(used) == 12
    ports = dict(zip(used, free_ports(12), strict=True))
    contents = []
    for block in found:
        moved = port.sub(lambda match: f"{match[1]}{ports[match[2]]}", block.text)
        contents.append((block.where, block.language, re.findall(r"^\$ (.*)", moved, re.MULTILINE)))
    merged = [
        f"until rt log dump n{number}/trades/merged | grep 12.50; do sleep 0.1; done" for number in (1, 2, 3)
    ]
    contents.append(("all nodes have it", "console", merged))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RT_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    environment["RT_PUB_TIMEOUT"] = str(WAIT_S)
    with nothing_left():
        environment |= {key: value for key, value in os.environ.items() if key == "RT_RUN_MARK"}
        result = subprocess.run(
            [sys.executable, "-c", RUNNER],
            cwd=root,
            env=environment,
            input=json.dumps(contents),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    log = (root / "nodes.log").read_text() if (root / "nodes.log").exists() else ""
    assert result.returncode == 0, result.stdout + log


def told(nodes: LocalCluster, name: str, target: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Return status and body; the status is 0 if the node does not answer."""
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    try:
        endpoint = f"127.0.0.1:{nodes.data_ports[name]}"
        answer = asyncio.run(ask([endpoint], nodes.certificate("operator", "op"), method, target, data))
    except rt.RtError:
        return 0, None
    return answer.status, json.loads(answer.body)


def test_backup_taken_under_load_restores_prefix_of_lost_log(root: Path) -> None:
    with LocalCluster(root / "c", 3) as nodes:
        nodes.start()
        leader = nodes.wait_ready()
        saved = next(name for name in nodes.names if name != leader)
        tls = nodes.certificate("publisher", "feed")
        with rt.Publisher(
            root / "p", "s", publisher_id="feed", endpoints=nodes.endpoints, tls=tls
        ) as publisher:
            has_enough = threading.Event()

            def load() -> None:
                while not has_enough.wait(0.001):
                    publisher.publish(b"%100d" % publisher.next_number)

            thread = threading.Thread(target=load)
            thread.start()
            try:
                nodes.wait_merged(50)
                assert nodes.stop(saved) == {saved: 0}
                subprocess.run(["cp", "-aT", nodes.directory(saved), root / "backup"], check=True)
                end = nodes.merged_position(saved)
                nodes.start(saved)
                nodes.wait_merged(end + 50)
            finally:
                has_enough.set()
                thread.join()
            publisher.wait(publisher.publish(b"last"), "merged", timeout=WAIT_S)
        assert not verify(root / "backup" / "s" / "merged").is_damaged
        _, before = told(nodes, leader, "/sessions")

        nodes.kill(*nodes.names)
        lost = Path(shutil.copytree(nodes.merged_directory(leader), root / "lost"))
        for name in nodes.names:
            nodes.wipe(name)
            nodes.directory(name).mkdir()  # The page creates it with `install -d`.
        subprocess.run(["cp", "-aT", root / "backup", nodes.directory(saved)], check=True)
        nodes.start()

        def is_forced() -> bool:
            return told(nodes, saved, "/soft-reset", {"force": True})[0] == 202 or is_done()

        def is_done() -> bool:
            status, reset = told(nodes, saved, "/reset-status")
            return status == 200 and reset["state"] == "done"

        nodes.wait(is_forced, "the forced reset to begin")
        nodes.wait(is_done, "the forced reset to be done")
        nodes.wait(lambda: told(nodes, saved, "/sessions")[0] == 200, "an answer")
        nodes.wait_merged(end)
        restored = Path(shutil.copytree(nodes.merged_directory(saved), root / "restored"))
        assert compare([root / "backup" / "s" / "merged", lost]).differences == ()
        # Messages may follow that only the backup's copy of the session had, in a new segment.
        assert messages(str(restored))[:end] == messages(str(lost))[:end]
        compared = compare([restored, *map(nodes.merged_directory, nodes.names)])
        assert compared.differences == ()
        assert 50 <= end <= compared.logs[0].end
        _, after = told(nodes, saved, "/sessions")
        assert [(one["name"], one["incarnation"]) for one in after] == [("feed", before[0]["incarnation"])]

        with rt.Publisher(
            root / "p", "s", publisher_id="feed", endpoints=nodes.endpoints, tls=tls
        ) as publisher:
            publisher.wait(publisher.publish(b"after the restore"), "merged", timeout=WAIT_S)


def test_commands_of_page_add_remove_and_replace_members(root: Path) -> None:
    """`n4` is added and removed, then `n5` replaces `n3`, whose machine is lost."""
    lines = [
        line for block in blocks(PAGE) for line in block.text.splitlines() if line.startswith("$ rt member ")
    ]
    words = [line.removeprefix("$ rt member ").split() for line in lines]
    assert [each[:-1] if ":" in each[-1] else each for each in words] == [
        ["add", "n4"],
        ["list"],
        ["remove", "n4"],
        ["replace", "n3", "n5"],
        ["cancel"],
    ]
    with GrowingCluster(root / "c", 5, 3) as nodes:
        nodes.start(*nodes.first)
        nodes.wait_ready()
        nodes.raise_level()
        for each in words[:4]:
            if each[0] in {"add", "replace"}:
                name = each[-2]
                nodes.start(name)
                each[-1] = nodes.raft_address(name)
            if each[0] == "replace":
                nodes.kill(each[1])
            done = nodes.member(*each, of=("n1", "n2"))
            assert done.returncode == 0, done.stderr
            if each[0] == "remove":
                assert nodes.wait_ended(each[1]) == 1
        assert nodes.roles(of=("n1",)) == dict.fromkeys(("n1", "n2", "n5"), "voter")
        refused = nodes.member("cancel", of=("n1",))
        assert "no change of members is being carried out" in refused.stderr


def test_page_explains_every_wait_reason_of_member_changes() -> None:
    text = (ROOT / PAGE).read_text()
    found = re.findall(r"""f"((?:[^"{]|\{[^}]*\})*)\"""", inspect.getsource(member_steps))
    waits = {said for said in found if said.startswith("{") and "is the only voter" not in said}

    assert len(waits) == 6
    for said in waits:
        words = [re.escape(part) for part in re.split(r"\{[^}]*\}", said)]
        assert re.search(r"\| `" + r"[\w, ]+".join(words) + "` \\|", text), said
