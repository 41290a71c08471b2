"""Each program in examples/ prints or publishes the expected results on local files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from spark_sessions import cheap_environment

import rt
from rt.testing.merged import MergedLogBuilder

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow


def run(
    name: str, *options: str, cwd: Path, stdin: str = "", environment: dict[str, str] | None = None
) -> str:
    command = [sys.executable, EXAMPLES / f"{name}.py", *options]
    done = subprocess.run(
        command, cwd=cwd, env=environment, input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    """A directory where the publisher service has published five prices."""
    lines = "99\n101\n102\n90\n103\n"
    assert "published 5 messages" in run(
        "publisher_service", "--topic", "trades/IBM", "--max-silence", "60", cwd=tmp_path, stdin=lines
    )
    return tmp_path


def test_subscriber_service_continues_after_its_last_acknowledged_message(prices: Path) -> None:
    assert run("subscriber_service", "--once", cwd=prices).splitlines()[0] == "0 feed1 0 trades/IBM b'99'"
    run("publisher_service", "--topic", "trades/IBM", cwd=prices, stdin="104\n")
    assert run("subscriber_service", "--once", cwd=prices) == "5 feed1 5 trades/IBM b'104'\n"


def test_asyncio_subscriber_stops_after_given_count(prices: Path) -> None:
    printed = run("asyncio_subscriber", "--count", "2", cwd=prices)
    assert printed == "0 trades/IBM b'99'\n1 trades/IBM b'101'\n"


def test_asyncio_publisher_publishes_messages_of_all_tasks(prices: Path) -> None:
    assert "published 6 messages" in run("asyncio_publisher", "--tasks", "3", cwd=prices)
    with rt.LogReader(prices / "data" / "trades" / "sessions" / "feed2") as reader:
        assert sorted(message.value for message in reader) == sorted(
            b"task %d %s" % (task, step) for task in range(3) for step in (b"began", b"ended")
        )


def test_arrow_batches_counts_messages_per_topic(prices: Path) -> None:
    assert run("arrow_batches", cwd=prices) == "trades/IBM 5\n"


def test_query_publishes_each_alert_once_over_two_runs(prices: Path) -> None:
    for _ in range(2):
        run("query", "--once", cwd=prices)
    with rt.LogReader(prices / "data" / "trades" / "sessions" / "alerts") as reader:
        assert [message.value for message in reader] == [b"trades/IBM 101.0", b"trades/IBM 103.0"]


def test_event_time_publishes_totals_and_late_orders_once_over_two_runs(tmp_path: Path) -> None:
    start = 1_767_225_600 * 10**9
    orders = [(1, "ann", 10), (12, "bob", 5), (8, "ann", 7), (31, "bob", 1), (3, "bob", 2)]
    with rt.Publisher(tmp_path / "data", "dev", publisher_id="feed1") as publisher:
        for second, user, amount in orders:
            value = json.dumps({"user": user, "amount": amount}).encode()
            publisher.publish(value, topic="orders", timestamp_ns=start + second * 10**9)
    for _ in range(2):
        run("event_time", "--once", cwd=tmp_path)
    with rt.LogReader(tmp_path / "data" / "dev" / "sessions" / "totals") as reader:
        published = [(message.topic, json.loads(message.value)) for message in reader]
    totals = [(value["key"], value["value"]) for topic, value in published if topic == "totals"]
    assert totals == [("ann", 17), ("bob", 5)]
    late = [value["value"] for topic, value in published if topic == "late"]
    assert late == [{"user": "bob", "amount": 2}]


def test_streams_host_prints_every_event(prices: Path) -> None:
    expected = [f"trades/IBM {at} b'{price}'\n" for at, price in enumerate((99, 101, 102, 90, 103))]
    command = [sys.executable, EXAMPLES / "streams_host.py", "--start", "earliest"]
    with subprocess.Popen(command, cwd=prices, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        printed = [host.stdout.readline() for _ in expected]
        host.kill()
    assert printed == expected
    run("streams_host", "--seconds", "0", cwd=prices)  # The program ends by itself.


def test_streams_subscription_continues_after_its_last_event_when_restarted(prices: Path) -> None:
    def printed(count: int) -> list[str]:
        command = [sys.executable, EXAMPLES / "streams_subscription.py", "--stream", "trades/IBM"]
        with subprocess.Popen([*command, "--seconds", "600"], cwd=prices, stdout=subprocess.PIPE) as host:
            assert host.stdout is not None
            lines = [host.stdout.readline().decode() for _ in range(count)]
            host.terminate()
        return lines

    assert printed(5)[-1] == "trades/IBM 4 b'103'\n"
    # The program ends cleanly.
    run("streams_subscription", "--stream", "trades/IBM", "--seconds", "1.5", cwd=prices)
    run("publisher_service", "--topic", "trades/IBM", cwd=prices, stdin="104\n")
    assert printed(1) == ["trades/IBM 5 b'104'\n"]


def test_spark_job_counts_messages_per_topic(prices: Path) -> None:
    merged = MergedLogBuilder(prices / "merged", cluster_id=bytes(16), stream="trades")
    merged.merge_all([prices / "data" / "trades" / "sessions" / "feed1"])
    merged.close()
    (directory := prices / "spark").mkdir()
    environment = cheap_environment(directory)
    assert run("spark_job", "--path", "merged", cwd=prices, environment=environment) == "trades/IBM 5\n"
