"""`rt streams hosts` combines the metrics of hosts into one table of queues and their problems."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prometheus_client.parser
import pytest
from click.testing import CliRunner

from rt.cli.streams import hosts as streams
from rt.errors import InvalidOption, RtError
from rt.exposition import exposition
from rt.streams.core.metrics import METRICS, QueueCounts, QueueStatus, StuckCall, metrics_of

DOCS = Path(__file__).parents[2] / "docs" / "streams.md"


def host(name: str, *queues: QueueStatus) -> str:
    return exposition(metrics_of("p", name, [(queue, QueueCounts(events=7)) for queue in queues]))


def test_queue_is_shown_with_values_of_its_owner() -> None:
    served = QueueStatus("q", "served", consumers=10, behind=2, low=500, lag=20, pressure=0.25)
    (row,) = streams.overview([host("h1", served), host("h2", QueueStatus("q"))])
    assert (row.owner, row.consumers, row.behind, row.low, row.lag, row.pressure) == (
        "h1",
        8,
        2,
        500,
        20,
        0.25,
    )
    assert row.problems == []
    cells = streams.as_table([row]).splitlines()[1].split()
    assert cells == ["p", "q", "h1", "8", "2", "0", "500", "20", "25%"]


def test_problems_of_queues_are_reported() -> None:
    bad = QueueStatus("q", "served", consumers=3, failing=1, faulted=2, unattended=4, pressure=0.95)
    rows = streams.overview([host("h1", bad, QueueStatus("r", "failed"), QueueStatus("s", "served"))])
    rows += streams.overview([host(name, QueueStatus("t", "served")) for name in ("h1", "h2")])
    assert [len(row.problems) for row in rows] == [4, 2, 0, 1]
    text = streams.as_table(rows)
    assert "r: its agent on h1 failed and will be restarted" in text
    assert "r: none of these hosts serves it" in text
    assert "q: 2 subscriptions are stopped" in text
    assert "none" in text


def test_stuck_consumer_is_reported_with_stream_and_age() -> None:
    call = StuckCall(93.4, 'odd/a "b"\\n\n\u2028c', "all")
    hanging = QueueStatus("q", "served", consumers=3, stuck=1, stuck_calls=(call,))
    (row,) = streams.overview([host("h1", hanging), host("h2", QueueStatus("q"))])
    assert row.stuck == 1
    assert row.problems == [
        f"the consumer of {call.stream} has not got past an event for 93 s (subscription all)"
    ]
    assert len(streams.as_table([row]).splitlines()) == 3


def test_exit_status_is_1_if_host_is_unreachable_or_queue_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"a:1": host("h1", QueueStatus("q", "served"))}

    def ask(endpoint: str, timeout_s: float) -> str:
        if endpoint not in texts:
            raise RtError("the host does not serve metrics", where=endpoint)
        return texts[endpoint]

    monkeypatch.setattr(streams, "ask", ask)
    runner = CliRunner()
    good = runner.invoke(streams.hosts, ["a:1", "--json"])
    assert good.exit_code == 0
    assert json.loads(good.stdout)["owner"] == "h1"
    away = runner.invoke(streams.hosts, ["a:1", "b:1"])
    assert away.exit_code == 1
    assert "the host does not serve metrics" in away.stderr
    texts["a:1"] = host("h1", QueueStatus("q", "failed"))
    assert runner.invoke(streams.hosts, ["a:1"]).exit_code == 1


@pytest.mark.parametrize("wrong", ["a", "http://a:1", "caf\udce9:1", "a:1", "a b:1"])
def test_invalid_or_repeated_host_raises_invalid_option(wrong: str) -> None:
    with pytest.raises(InvalidOption, match="HOST:PORT"):
        streams.hosts.main(["a:1", wrong], standalone_mode=False)


def test_unreachable_host_raises_error_with_its_address() -> None:
    with pytest.raises(RtError, match=r"the host does not serve metrics \(at 127.0.0.1:1\)"):
        streams.ask("127.0.0.1:1", 1.0)


def test_metrics_parse_as_prometheus_text_and_match_documentation() -> None:
    text = host("h1", QueueStatus("q", "served", consumers=1))
    families = list(prometheus_client.parser.text_string_to_metric_families(text))
    assert len(families) == len(METRICS)
    assert all(sample.labels["queue"] == "q" for family in families for sample in family.samples)
    table = DOCS.read_text()
    for metric in metrics_of("p", "h1", []):
        labels = ", ".join(f"`{label}`" for label in metric.labels[3:])
        assert f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |" in table


def test_invalid_numbers_and_escape_codes_are_not_shown_and_non_http_answer_is_rejected() -> None:
    name = 'rt_streams_lag_events{provider="p",host="h1",queue="\x1b[2Jq"}'
    owned = 'rt_streams_queue_owned{provider="p",host="h1",queue="\x1b[2Jq"} 1'
    rows = streams.overview(["\n".join([owned, f"{name} abc", f"{name} nan", f"{name} +Inf"])])
    assert [row.lag for row in rows] == [0]
    assert "\x1b" not in streams.as_table(rows)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-none\r\n\r\n")

        answering = pool.submit(answer)
        with pytest.raises(RtError, match="the host does not serve metrics"):
            streams.ask(f"127.0.0.1:{server.getsockname()[1]}", 60)
        answering.result(60)
