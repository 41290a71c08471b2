"""A cluster is upgraded and downgraded node by node under load, together with an earlier rt version.

No message is lost, repeated or reordered.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import upgrade_client
from operator_calls import told

import rt
from rt.child_process import ChildProcess
from rt.net.identity import Role
from sequencer.localcluster.clients import client_settings
from sequencer.localcluster.nodes import LocalCluster, differences

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EARLIER = "81db653e0dc08ecfa2ee930bc5f783a4623132ef"
"""The commit of the earlier program: the first commit that negotiates versions of files and protocols."""
EARLIER_VERSION = "0.1.0+earlier"
"""The version that its nodes report, so that /status shows which program a node runs."""
WAIT_S = 300.0
BATCHES = 3
"""How many more batches each publisher publishes in each mix of versions."""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory for PYTHONPATH that contains the unpacked wheel of the earlier program."""
    from hatchling.builders.wheel import WheelBuilder

    if subprocess.run(
        ["git", "-C", ROOT, "cat-file", "-e", f"{EARLIER}^{{commit}}"], capture_output=True, check=False
    ).returncode:
        pytest.skip(f"the history does not contain {EARLIER}: a shallow clone, or no clone")
    folder = tmp_path_factory.mktemp("earlier")
    sources, wheels, unpacked = (folder / name for name in ("sources", "wheels", "unpacked"))
    archive = folder / "sources.zip"
    subprocess.run(
        ["git", "-C", ROOT, "archive", "--format=zip", "-o", archive, EARLIER], check=True, timeout=WAIT_S
    )
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(sources)
    module = sources / "rt" / "__init__.py"
    text = module.read_text()
    assert '__version__ = "0.1.0"' in text
    module.write_text(text.replace('__version__ = "0.1.0"', f'__version__ = "{EARLIER_VERSION}"'))
    [wheel] = WheelBuilder(str(sources)).build(directory=str(wheels), versions=["standard"])
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(unpacked)
    return unpacked


class MixedCluster(LocalCluster):
    """Nodes of two programs. The nodes in `earlier_nodes` run the earlier program."""

    def __init__(self, root: Path, earlier: Path) -> None:
        super().__init__(root)
        self.earlier, self.earlier_nodes = earlier, set(self.names)

    def _environment(self, name: str) -> dict[str, str]:
        return self.environment(is_earlier=name in self.earlier_nodes)

    def environment(self, *, is_earlier: bool) -> dict[str, str]:
        environment = super()._environment("")
        return {**environment, "PYTHONPATH": str(self.earlier)} if is_earlier else environment

    def replace(self, name: str, *, is_earlier: bool) -> None:
        """Stop a node, start it with that program, and wait until the others see it ready."""
        assert self.stop(name) == {name: 0}
        self.switch(name, is_earlier=is_earlier)
        self.start(name)
        self.wait_ready()
        self.wait_version(name)

    def refusal(self, name: str) -> str:
        """Start a stopped node with the earlier program, which must end with an error; return the error."""
        self.switch(name, is_earlier=True)
        self.start(name)
        assert self.wait_ended(name, timeout_s=WAIT_S) == 1
        words = self.last_words(name)
        assert "the cluster has a feature level that this rt does not know" in words
        assert ": got level 2, expected level 1 at most" in words
        return words

    def restart(self, name: str) -> None:
        """Start a stopped node with this program, and wait until the others see it ready."""
        self.switch(name, is_earlier=False)
        self.start(name)
        self.wait_version(name)

    def switch(self, name: str, *, is_earlier: bool) -> None:
        (self.earlier_nodes.add if is_earlier else self.earlier_nodes.discard)(name)

    def wait_version(self, name: str) -> None:
        """Wait until all nodes see this node ready, with the version of its program."""
        version = EARLIER_VERSION if name in self.earlier_nodes else rt.__version__

        def is_seen() -> bool:
            seen = [
                one
                for by in self.running
                for one in told(self, "/status", by=by)["members"]
                if one["name"] == name
            ]
            are_ready = [(one["phase"], one["version"]) == ("ready", version) for one in seen]
            return len(are_ready) == len(self.running) and all(are_ready)

        self.wait(is_seen, f"{name} to be ready with version {version}", timeout_s=WAIT_S)

    def replace_all(self, *, is_earlier: bool) -> Iterator[str]:
        """Replace each node that runs the other program, the leader last; yield each name afterwards."""
        while others := [one for one in self.names if (one in self.earlier_nodes) != is_earlier]:
            leader = self.wait_ready()
            name = next((one for one in others if one != leader), leader)
            self.replace(name, is_earlier=is_earlier)
            yield name


class Client:
    """A publisher or a subscriber in a separate process. It works until `stop`."""

    def __init__(self, nodes: MixedCluster, role: Role, name: str, *, is_earlier: bool) -> None:
        assert role in {"publisher", "subscriber"}
        self._nodes, self.name, self.role = nodes, name, role
        self._version = EARLIER_VERSION if is_earlier else rt.__version__
        self._state = nodes.root / "clients" / name
        self._state.mkdir(parents=True)
        settings = client_settings(nodes, role, name, self._state / "log", state=str(self._state))
        self._stderr = self._state / "stderr"
        command = [sys.executable, "-P", upgrade_client.__file__, role, json.dumps(settings)]
        with self._stderr.open("wb") as stderr:
            self._process = ChildProcess(
                command, env=nodes.environment(is_earlier=is_earlier), stderr=stderr, stdout=stderr
            )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()

    @property
    def progress(self) -> dict[str, int]:
        """Return the number of messages for each session: published and merged ones, or read ones."""
        assert self._process.status is None, (self.name, self._stderr.read_text()[-2000:])
        try:
            found: dict[str, Any] = json.loads((self._state / "progress").read_text())
        except FileNotFoundError:
            return {}
        assert found.pop("version") == self._version
        return found

    def stop(self) -> dict[str, int]:
        """Stop the client; return its last progress."""
        (self._state / "stop").touch()
        status = self._process.wait(WAIT_S)
        assert status == 0, (self.name, status, self._stderr.read_text()[-2000:])
        found: dict[str, Any] = json.loads((self._state / "progress").read_text())
        del found["version"]
        return found


class Load:
    """A publisher and a subscriber of each program."""

    def __init__(self, nodes: MixedCluster, opened: ExitStack) -> None:
        self._nodes = nodes
        made = [
            opened.enter_context(Client(nodes, role, f"{role}{number}", is_earlier=number == 1))
            for role in ("publisher", "subscriber")
            for number in (1, 2)
        ]
        self._publishers, self._subscribers = made[:2], made[2:]

    def go_on(self) -> None:
        """Wait until each publisher has published more batches and all subscribers have read them."""
        step = BATCHES * upgrade_client.BATCH
        wanted = {one.name: one.progress.get(one.name, 0) + step for one in self._publishers}
        self._wait_read(wanted)

    def stop(self) -> int:
        """Stop the publishers, then the subscribers once they have everything; return the number of
        messages.
        """
        published = {name: count for one in self._publishers for name, count in one.stop().items()}
        self._wait_read(published)
        for subscriber in self._subscribers:
            assert subscriber.stop() == published
        return sum(published.values())

    def _wait_read(self, wanted: dict[str, int]) -> None:
        def is_read() -> bool:
            reads = [one.progress for one in self._subscribers]
            return all(one.get(name, 0) >= count for one in reads for name, count in wanted.items())

        self._nodes.wait(is_read, f"subscribers to read {wanted}", timeout_s=WAIT_S)


@pytest.fixture
def nodes(earlier: Path) -> Iterator[MixedCluster]:
    with tempfile.TemporaryDirectory(prefix="rt-") as root, MixedCluster(Path(root), earlier) as nodes:
        yield nodes


def test_rolling_upgrade_and_downgrade_under_load_lose_no_messages(nodes: MixedCluster) -> None:
    nodes.start()
    nodes.wait_ready()
    with ExitStack() as opened:
        load = Load(nodes, opened)
        load.go_on()
        for is_earlier in (False, True):
            for _ in nodes.replace_all(is_earlier=is_earlier):
                load.go_on()
            versions = {one["version"] for one in told(nodes, "/status")["members"]}
            assert versions == {EARLIER_VERSION if is_earlier else rt.__version__}
        count = load.stop()
    nodes.wait_merged(count)
    assert nodes.stop() == dict.fromkeys(nodes.names, 0)
    assert differences(nodes.compare(), count) == []


def test_feature_level_is_raised_once_all_members_know_it_and_earlier_node_then_refuses(
    nodes: MixedCluster,
) -> None:
    raised = {"level": 2}
    nodes.earlier_nodes = {"n3"}
    nodes.start()
    nodes.wait_ready()
    for name in nodes.names:
        nodes.wait_version(name)
    with pytest.raises(rt.RtError, match=f"member n3.*rt {re.escape(EARLIER_VERSION)} with level 1 at most"):
        told(nodes, "/raise-feature-level", raised)
    with ExitStack() as opened:
        load = Load(nodes, opened)
        nodes.replace("n3", is_earlier=False)
        assert ["`rt features raise 2`" in note for note in told(nodes, "/status")["notes"]] == [True]
        assert told(nodes, "/raise-feature-level", raised) == {"featureLevel": 2}
        nodes.wait(
            lambda: {told(nodes, "/status", by=name)["featureLevel"] for name in nodes.names} == {2},
            "all nodes to have the level",
        )
        load.go_on()

        assert nodes.stop("n3") == {"n3": 0}
        # The level is in a command or in a snapshot.
        assert f"in {nodes.directory('n3')}/raft" in nodes.refusal("n3")
        load.go_on()
        nodes.restart("n3")
        load.go_on()
        count = load.stop()

    # After a reset, all snapshots contain the level. A blank node gets the snapshot of a peer.
    assert nodes.stop("n3") == {"n3": 0}
    told(nodes, "/soft-reset", {})
    nodes.wait(
        lambda: all(told(nodes, "/status", by=name)["epoch"] == 2 for name in nodes.running), "the next epoch"
    )
    nodes.wipe("n3")
    assert "a snapshot that a peer sent; the files of this node are unchanged" in nodes.refusal("n3")
    nodes.restart("n3")
    assert nodes.stop("n3") == {"n3": 0}
    assert f"the newest snapshot in {nodes.directory('n3')}/raft" in nodes.refusal("n3")
    nodes.restart("n3")
    nodes.wait_merged(count)
    assert nodes.stop() == dict.fromkeys(nodes.names, 0)
    assert differences(nodes.compare(), count) == []
