"""`rt bench compare`: configurations, the order check, the table, server processes and real runs."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from nodes_bench import wait_until

from rt.bench.measure import Figure
from rt.bench.processes import read_stat
from rt.cli.commands.bench import bench
from rt.errors import RtError, Timeout
from sequencer.bench.compare import bench as compare_bench
from sequencer.bench.compare import nats_jetstream, rabbitmq_streams, redis_streams
from sequencer.bench.compare import programs as programs_module
from sequencer.bench.compare.programs import Programs, version_of
from sequencer.bench.compare.redis_streams import RedisPublisher
from sequencer.bench.compare.system import (
    PEERS,
    CollectedValues,
    Facts,
    NotInstalled,
    library,
    program,
    system,
)
from sequencer.bench.compare.table import Compared, table
from sequencer.bench.compare.traffic import HEAD_BYTES, SequenceCheck, make_values, read_heads
from sequencer.localcluster.loopback import free_port
from sequencer.localcluster.processes import ProcessEnded

PAIR = ("/pki/ca.crt", "/pki/n1.crt", "/pki/n1.key")

# Message contents and order


@pytest.mark.parametrize(
    ("batches", "lost", "wrong"),
    [
        ([], 0, 0),
        ([[0, 1], [2]], 0, 0),
        ([[0, 2]], 1, 0),
        ([[3]], 3, 0),
        ([[0, 0, 1]], 0, 1),
        ([[0, 1], [0, 1]], 0, 2),
        ([[1, 0]], 1, 1),
        ([[0], [2, 1], [3]], 1, 1),
    ],
)
def test_sequence_check_counts_missing_and_repeated_messages(
    batches: list[list[int]], lost: int, wrong: int
) -> None:
    check = SequenceCheck()
    for batch in batches:
        check.add(np.array(batch, np.int64))
    assert (check.received, check.lost, check.wrong) == (sum(map(len, batches)), lost, wrong)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=5))
def test_sequence_check_agrees_with_naive_check(batches: list[list[int]]) -> None:
    check, highest, lost, wrong = SequenceCheck(), -1, 0, 0
    for batch in batches:
        check.add(np.array(batch, np.int64))
    for number in (number for batch in batches for number in batch):
        wrong += number <= highest
        lost += max(0, number - highest - 1)
        highest = max(highest, number)
    assert (check.lost, check.wrong) == (lost, wrong)


def test_value_carries_its_number_and_due_time() -> None:
    values = make_values(7, [100, 200], b"filler")
    assert [len(value) for value in values] == [HEAD_BYTES + 6] * 2
    numbers, due_ns = read_heads(values)
    assert (numbers.tolist(), due_ns.tolist()) == ([7, 8], [100, 200])


def test_collected_values_are_received_in_order_and_once() -> None:
    async def run() -> list[Sequence[bytes]]:
        collected = CollectedValues()
        collected.add(b"a")
        collected.add(b"b")
        first = await collected.receive()
        asyncio.get_running_loop().call_soon(collected.add, b"c")
        return [first, await collected.receive()]

    assert asyncio.run(run()) == [[b"a", b"b"], [b"c"]]


# The table


def a_system(name: str, median: float) -> Compared:
    facts = Facts(f"{name} 1.0", "client", "of three", "each message", "mutual", "reads")
    figures = (Figure("acknowledged", (1.0, median, 1000.0), "MB/s"), Figure("p50", (median,), "ms"))
    return Compared(name, facts, 12_345, 0, 1, figures)


def test_table_has_column_for_each_system_and_row_for_each_figure() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table([a_system("rt", 30.0), a_system("nats", 2.5)])
    ]
    verified = "12,345 messages: 0 lost, 1 repeated or out of order"
    assert [rows[0], *rows[2:]] == [
        ["", "rt 1.0", "nats 1.0"],
        ["Python client", "client", "client"],
        ["replication", "of three", "of three"],
        ["fsync", "each message", "each message"],
        ["TLS", "mutual", "mutual"],
        ["consumer", "reads", "reads"],
        ["verified by the consumer", verified, verified],
        ["acknowledged", "30.00 MB/s (1.00 to 1000)", "2.50 MB/s (1.00 to 1000)"],
        ["p50", "30.00 ms (30.00 to 30.00)", "2.50 ms (2.50 to 2.50)"],
    ]
    assert {cell.strip("-") for cell in rows[1]} == {""}


# Configurations


@pytest.mark.parametrize(
    ("tls", "is_synced", "expected", "missing"),
    [
        (None, False, ['routes: ["nats-route://127.0.0.1:3", "nats-route://127.0.0.1:4"]'], ["tls", "sync"]),
        (None, True, ['jetstream { store_dir: "/d", sync_interval: always }'], ["tls"]),
        (PAIR, False, ['cert_file: "/pki/n1.crt"', "verify: true"], ["sync"]),
    ],
)
def test_nats_server_config_has_expected_settings(
    tls: Sequence[str] | None, is_synced: bool, expected: list[str], missing: list[str]
) -> None:
    text = nats_jetstream.render_config("n1", "/d", 1, 3, [3, 4], tls, is_synced)
    assert [each for each in expected if each not in text] == []
    assert [each for each in missing if each in text] == []
    assert text.count("tls {") == (2 if tls else 0)


@pytest.mark.parametrize(
    ("version", "can_sync"), [("2.9.10", False), ("2.10.0", True), ("2.14", True), ("unknown", False)]
)
def test_nats_can_sync_each_message_since_version_2_10(version: str, can_sync: bool) -> None:
    assert nats_jetstream.can_sync(version) == can_sync


@pytest.mark.parametrize(
    ("primary", "tls", "is_synced", "expected"),
    [
        (None, None, True, {"port 7", "appendfsync always"}),
        (6, None, False, {"port 7", "appendfsync everysec", "replicaof 127.0.0.1 6"}),
        (6, PAIR, True, {"port 0", "tls-port 7", "tls-replication yes", "tls-auth-clients yes"}),
    ],
)
def test_redis_server_config_has_expected_settings(
    primary: int | None, tls: Sequence[str] | None, is_synced: bool, expected: set[str]
) -> None:
    lines = redis_streams.render_config("/d", 7, primary, tls, is_synced).splitlines()
    assert expected | {"dir /d", "appendonly yes", "bind 127.0.0.1"} <= set(lines)
    assert any(line.startswith("replicaof") for line in lines) == (primary is not None)
    assert any(line.startswith("tls-") for line in lines) == (tls is not None)


@pytest.mark.parametrize(
    ("tls", "expected"),
    [
        (None, {"stream.listeners.tcp.1 = 127.0.0.1:7", "stream.advertised_port = 7"}),
        (PAIR, {"stream.listeners.tcp = none", "stream.listeners.ssl.1 = 127.0.0.1:7"}),
    ],
)
def test_rabbitmq_server_config_has_expected_settings(tls: Sequence[str] | None, expected: set[str]) -> None:
    lines = rabbitmq_streams.render_config(7, tls).splitlines()
    assert expected | {"listeners.tcp = none"} <= set(lines)
    assert any(line.startswith("ssl_options") for line in lines) == (tls is not None)
    assert rabbitmq_streams.render_advanced_config([5, 9, 3]) == "[{osiris, [{port_range, {3, 9}}]}].\n"


# Redis pipeline


class Connection:
    """A connection that answers `XADD` with an id and `WAIT` with a number of replicas."""

    def __init__(self, replicas: int) -> None:
        self._replicas, self._answers = replicas, asyncio.Queue[Any]()
        self.commands: list[str] = []

    def pack_commands(self, commands: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return commands

    async def send_packed_command(self, commands: list[tuple[Any, ...]], **_: object) -> None:
        for name, *_rest in commands:
            self.commands.append(name)
            self._answers.put_nowait(self._replicas if name == "WAIT" else b"1-0")

    async def read_response(self, **_: object) -> Any:
        return await self._answers.get()


def test_redis_publisher_counts_messages_acknowledged_by_replica() -> None:
    async def run() -> tuple[list[int], list[str]]:
        connection = Connection(replicas=1)
        publisher = RedisPublisher(connection)
        counts = []
        await publisher.publish([b"a", b"b"])
        await publisher.flush()
        counts.append(publisher.acknowledged)
        for _ in range(20):
            await publisher.publish([b"c"])
        await publisher.flush()
        return [*counts, publisher.acknowledged], connection.commands

    counts, commands = asyncio.run(run())
    assert counts == [2, 22]
    assert commands == ["XADD", "XADD", "WAIT", "WAIT", *["XADD"] * 20, "WAIT"]


def test_redis_error_fails_publisher_flush() -> None:
    class Broken(Connection):
        async def read_response(self, **_: object) -> Any:
            raise RtError("OOM")

    async def run() -> None:
        await RedisPublisher(Broken(replicas=1)).flush()

    with pytest.raises(RtError, match="OOM"):
        asyncio.run(run())


# Programs and libraries


def test_missing_program_error_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_options: None)
    with pytest.raises(NotInstalled, match="nats-server is not installed") as error:
        program("nats-server", "nats-server")
    assert "apt-get install nats-server" in str(error.value)


def test_missing_library_error_names_bench_extra() -> None:
    with pytest.raises(NotInstalled, match="package no-such-client is not installed") as error:
        library("no_such_client_of_a_peer", "no-such-client")
    assert "rt-transport[bench]" in str(error.value)


@pytest.mark.parametrize("peer", PEERS)
def test_missing_peer_is_reported_before_any_round_starts(
    peer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_options: None)
    result = CliRunner().invoke(bench, ["compare", "--peer", peer, "--directory", str(tmp_path)])
    assert isinstance(result.exception, NotInstalled)
    assert "round" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_program_version_is_first_dotted_number_of_output() -> None:
    assert version_of([sys.executable, "-c", "print('server v=7.0.15 sha=00:1')"]) == "7.0.15"
    assert version_of([sys.executable, "-c", "print('nothing')"]) == "unknown"


def is_running(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.is_running


_HOLDS_ONE = """
import pathlib, sys, time
from sequencer.bench.compare.programs import Programs
with Programs(pathlib.Path(sys.argv[1])) as programs:
    programs.start("one", ["sh", "-c", sys.argv[2]])
    time.sleep(1000)
"""
_PRINTS_ITS_ID = "echo $$ > {path}; exec sleep 1000"


def written_id(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path} is written")
    return int(path.read_text())


def test_programs_are_killed_on_exit_by_interrupt(tmp_path: Path) -> None:
    path = tmp_path / "id"
    with pytest.raises(KeyboardInterrupt), Programs(tmp_path) as programs:
        programs.start("one", ["sh", "-c", _PRINTS_ITS_ID.format(path=path)])
        pid = written_id(path)
        assert is_running(pid)
        raise KeyboardInterrupt
    wait_until(lambda: not is_running(pid), "the program is killed")


def test_program_is_killed_when_its_holder_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "id"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _HOLDS_ONE,
            str(tmp_path),
            _PRINTS_ITS_ID.format(path=path),
        ]
    )
    try:
        pid = written_id(path)
    finally:
        holder.kill()
        holder.wait()
    wait_until(lambda: not is_running(pid), "the program is killed")


def test_program_exit_is_reported_with_status_and_log(tmp_path: Path) -> None:
    with Programs(tmp_path) as programs, pytest.raises(ProcessEnded, match="bad setting") as error:
        programs.start("one", ["sh", "-c", "echo bad setting >&2; exit 3"])
        programs.wait_listening([1])
    assert "status 3" in str(error.value)


def test_timeout_names_ports_on_which_no_program_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs_module, "_WAIT_S", 0.0)
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server, Programs(tmp_path) as programs:
        programs.start("one", ["sh", "-c", "exec sleep 1000"])
        with pytest.raises(Timeout, match=rf"do not listen in time \(at port {port}\).*within 0 s"):
            programs.wait_listening([server.getsockname()[1], port])


# Real runs


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path, because a node creates a Unix socket below it."""
    with tempfile.TemporaryDirectory(prefix="rt") as path:
        yield Path(path)


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_short_comparison_verifies_all_messages_and_removes_its_files(
    peer: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        system(peer).check()
    except NotInstalled as error:
        pytest.skip(str(error))
    monkeypatch.setattr(compare_bench, "_WARM_UP_S", 0.2)
    options = ["--rounds", "1", "--seconds", "0.5", "--rate-hz", "200", "--json", "--directory", str(root)]
    result = CliRunner().invoke(bench, ["compare", "--peer", peer, *options])
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["system"] for each in found] == ["rt", peer]
    assert [(each["lost"], each["wrong"]) for each in found] == [(0, 0)] * 2
    assert all(each["received"] > 0 for each in found)
    names = [[figure["name"] for figure in each["figures"]] for each in found]
    assert names[0] == names[1]
    assert len(names[0]) == 7
    # A consumer may receive nothing in such a short run.
    positive = [
        figure["median"] > 0
        for each in found
        for figure in each["figures"]
        if figure["name"] != "received meanwhile"
    ]
    assert all(positive), found
    assert list(root.iterdir()) == []
