"""`rt pull`: its options, copying until a signal, and `--repair`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from log_items import files_of, publish
from receiving_node import CLUSTER, FakeNode, make_pki, silent_endpoint, tls_of, until

from replicator.cli.pull import pull
from rt.errors import InvalidOption, RtError
from rt.log.disk import REAL
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.testing.merged import MergedLogBuilder
from sequencer.localcluster.loopback import free_port

RT = """import sys
from rt.cli.main import cli, main
from replicator.cli.pull import pull

cli.add_command(pull)
"""

TLS_FILES = (("ca", "ca.crt"), ("cert", "sub.crt"), ("key", "sub.key"))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["copy"],
        ["copy", "--stream", "s"],
        ["copy", "--stream", "s", "--endpoints", "n1:5002"],
        ["copy", "--stream", "s", "--endpoints", "n1:5002", "--insecure", "--ca", __file__],
        ["copy", "--stream", "../s", "--endpoints", "n1:5002", "--insecure"],
        ["copy", "--stream", "s", "--endpoints", "n1:5002", "--insecure", "--retention", "never"],
        ["copy", "--stream", "s", "--endpoints", "n1:5002", "--insecure", "--position", "-1"],
        ["copy", "--stream", "s", "--endpoints", "n1:5002", "--insecure", "--repair", "--attached"],
    ],
)
def test_invalid_options_exit_with_2_and_create_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(pull, arguments).exit_code == 2
    assert os.listdir(tmp_path) == []


def test_pull_without_tls_rejects_remote_endpoint(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "c"), "--stream", "s", "--endpoints", "far.example:5002", "--insecure"]
    result = CliRunner().invoke(pull, arguments)
    assert isinstance(result.exception, ValueError)


def test_name_option_selects_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init_ca(tmp_path / "pki")
    for name in ("reader1", "reader2"):
        issue(tmp_path / "pki", Identity("s", "subscriber", name))
    url = f"rt://127.0.0.1:{free_port()}/s?tls_dir={tmp_path / 'pki'}&path={tmp_path}"
    monkeypatch.setenv("RT_URL", url)
    arguments = [str(tmp_path / "c"), "--stream", "s", "--repair", "--connect-timeout", "0.1"]
    several = CliRunner().invoke(pull, arguments).exception
    assert isinstance(several, InvalidOption)
    assert "reader1, reader2" in str(several)
    (tmp_path / "c").mkdir()
    MergedLogBuilder(tmp_path / "c", cluster_id=CLUSTER, stream="s").close()
    named = CliRunner().invoke(pull, [*arguments, "--name", "reader2"])
    assert named.exit_code == 0, named.output


@pytest.mark.slow
def test_pull_copies_until_signal_ends_it(tmp_path: Path) -> None:
    pki = make_pki(tmp_path / "pki")

    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        source = publish(REAL, 100, 200, root=str(tmp_path / "source"))
        merged = MergedLogBuilder(node.merged, cluster_id=CLUSTER, stream="s")
        merged.merge_all([source])
        copy = str(tmp_path / "copy")
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            tls = [f"--{name}={pki / file}" for name, file in TLS_FILES]
            command = ["pull", copy, "--stream=s", f"--endpoints={endpoint}", *tls, "--name=sub"]
            child = subprocess.Popen([sys.executable, "-c", RT + f"sys.exit(main({command!r}))"])
            try:
                await until(
                    lambda: Path(copy).exists() and files_of(REAL, copy) == files_of(REAL, node.merged)
                )
                merged.merge_all([publish(REAL, 300, root=str(tmp_path / "source"))])
                await until(lambda: files_of(REAL, copy) == files_of(REAL, node.merged))
                child.send_signal(signal.SIGTERM)
                await until(lambda: child.poll() is not None)
                assert child.returncode == 128 + signal.SIGTERM
            finally:
                child.kill()
                child.wait()
        merged.close()

    asyncio.run(main())


def test_repair_restores_corrupt_copy_and_ends(tmp_path: Path) -> None:
    pki = make_pki(tmp_path / "pki")

    async def main() -> None:
        node = FakeNode(tmp_path / "node")
        source = publish(REAL, 100, 2000, root=str(tmp_path / "source"))
        with MergedLogBuilder(node.merged, cluster_id=CLUSTER, stream="s") as merged:
            merged.merge_all([source])
        copy = tmp_path / "copy"
        shutil.copytree(node.merged, copy)
        file = copy / "log.0.0"
        data = bytearray(file.read_bytes())
        data[1500] ^= 1
        file.write_bytes(bytes(data))
        async with node.serving(tls_of(pki, "n1")) as endpoint:
            tls = [f"--{name}={pki / file}" for name, file in TLS_FILES]
            arguments = [str(copy), "--stream=s", f"--endpoints={endpoint}", *tls, "--repair"]
            repaired = await asyncio.to_thread(CliRunner().invoke, pull, arguments)
            again = await asyncio.to_thread(CliRunner().invoke, pull, arguments)
        assert (repaired.exit_code, again.exit_code) == (0, 0), (repaired.output, again.output)
        assert f"repaired {file}: 1 bytes" in repaired.output
        assert "nothing is corrupt" in again.output
        assert files_of(REAL, str(copy)) == files_of(REAL, node.merged)

    asyncio.run(main())


def test_repair_ends_with_reason_if_no_node_answers_within_timeout(tmp_path: Path) -> None:
    pki = make_pki(tmp_path / "pki")

    async def main() -> None:
        source = publish(REAL, 100, 2000, root=str(tmp_path / "source"))
        copy = tmp_path / "copy"
        with MergedLogBuilder(str(copy), cluster_id=CLUSTER, stream="s") as merged:
            merged.merge_all([source])
        file = copy / "log.0.0"
        data = bytearray(file.read_bytes())
        data[1500] ^= 1
        file.write_bytes(bytes(data))
        async with silent_endpoint() as endpoint:
            tls = [f"--{name}={pki / file}" for name, file in TLS_FILES]
            arguments = [str(copy), "--stream=s", f"--endpoints={endpoint}", *tls, "--repair"]
            arguments += ["--connect-timeout", "0.05"]
            ended = await asyncio.to_thread(CliRunner().invoke, pull, arguments)
        assert isinstance(ended.exception, RtError), ended.output
        assert f"{endpoint}: no answer yet (at {endpoint})" in str(ended.exception)
        assert file.read_bytes() == bytes(data), "nothing was changed"

    asyncio.run(main())
