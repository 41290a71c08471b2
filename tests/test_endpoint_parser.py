"""The endpoint parser, and all functions that take endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rt
from replicator.pull.remote_log import RemoteLog
from replicator.push.client import PushClient
from rt.endpoints import Endpoint, check_endpoints, parse_endpoint, split_endpoints
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.lease_client import LeaseCalls
from rt.net.rest_client import ask
from rt.net.tls import TLS
from rt.sidecar.pull_settings import PullSettings
from sequencer.config.config import BadSetting, ClusterMember

MALFORMED = [
    ("", "port is missing"),
    ("n1", "port is missing"),
    ("127.0.0.1", "port is missing"),
    ("[::1]", "port is missing"),
    ("::1:5002", "port is missing, or an IPv6 address is not in brackets"),
    ("https://n1:5002", "no scheme"),
    ("n1:", "not a number from 1 to 65535"),
    ("n1:0", "not a number from 1 to 65535"),
    ("n1:-1", "not a number from 1 to 65535"),
    ("n1:65536", "not a number from 1 to 65535"),
    ("n1:01000000", "not a number from 1 to 65535"),
    ("n1:99999", "not a number from 1 to 65535"),
    ("n1:abc", "not a number from 1 to 65535"),
    ("n1:5002/x", "not a number from 1 to 65535"),
    ("n1:\u0665", "not a number from 1 to 65535"),
    (":5002", "host is not a name"),
    ("[]:5002", "host is not a name"),
    ("[n1]:5002", "host is not a name"),
    ("a b:5002", "host is not a name"),
    ("n1,n2:5002", "host is not a name"),
    ("-n1:5002", "host is not a name"),
    ("n1..example:5002", "host is not a name"),
    ("1.2.3:5002", "host is not a name"),
    ("1.2.3.400:5002", "host is not a name"),
    (f"{'n' * 64}:5002", "host is not a name"),
]


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("n1:80", Endpoint("n1", 80)),
        ("10.0.0.1:65535", Endpoint("10.0.0.1", 65535)),
        ("[::1]:1", Endpoint("::1", 1)),
        (
            "rt-0.rt_nodes.default.svc.cluster.local.:7000",
            Endpoint("rt-0.rt_nodes.default.svc.cluster.local.", 7000),
        ),
    ],
)
def test_endpoint_of_host_name_ipv4_or_bracketed_ipv6_is_parsed(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(("text", "problem"), MALFORMED)
def test_malformed_endpoint_is_rejected_with_option_and_problem(text: str, problem: str) -> None:
    with pytest.raises(rt.InvalidOption, match=problem) as refused:
        parse_endpoint(text, where="--endpoints")
    assert (refused.value.where, refused.value.got) == ("--endpoints", repr(text))


@given(st.text(max_size=20) | st.from_regex(r"[a-z0-9.\[\]:-]{1,12}:[0-9]{1,6}"))
def test_endpoint_is_rejected_or_round_trips_through_text(text: str) -> None:
    try:
        endpoint = parse_endpoint(text)
    except rt.InvalidOption:
        return
    assert endpoint.host
    assert 0 < endpoint.port < 65536
    assert parse_endpoint(str(endpoint)) == endpoint


def test_endpoint_list_is_split_at_commas() -> None:
    assert split_endpoints(" n1:5002, [::1]:01 ,") == ("n1:5002", "[::1]:1")


@pytest.mark.parametrize("text", ["", " , "])
def test_empty_endpoint_list_is_rejected(text: str) -> None:
    with pytest.raises(rt.InvalidOption, match="no endpoint is named"):
        split_endpoints(text)


def test_duplicate_endpoint_is_rejected() -> None:
    with pytest.raises(rt.InvalidOption, match=r"named twice .*: got n1:1$"):
        check_endpoints(["n1:1", "n2:1", "n1:01"])


def test_single_string_as_endpoint_sequence_is_rejected() -> None:
    with pytest.raises(rt.InvalidOption, match="a sequence of 'host:port'"):
        check_endpoints("n1:5002")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TLS:
    directory = tmp_path_factory.mktemp("pki")
    init_ca(directory)
    issue(directory, Identity("s", "publisher", "feed"))
    return TLS(directory / "ca.crt", directory / "feed.crt", directory / "feed.key")


TAKERS: dict[str, Callable[[Path, TLS, list[str]], Any]] = {
    "Publisher": lambda path, tls, endpoints: rt.Publisher(path, "s", endpoints=endpoints, tls=tls),
    "Subscriber": lambda path, tls, endpoints: rt.Subscriber(path, "s", endpoints=endpoints, tls=tls),
    "aio.Subscriber": lambda path, tls, endpoints: rt.aio.Subscriber(path, "s", endpoints=endpoints, tls=tls),
    "rt pull": lambda _, tls, endpoints: PullSettings("s", tuple(endpoints), tls),
    "rt push": lambda path, tls, endpoints: PushClient(path, "s", endpoints, tls),
    "REST": lambda _, tls, endpoints: asyncio.run(ask(endpoints, tls, "GET", "/status")),
    "leases": lambda _, tls, endpoints: LeaseCalls(endpoints, tls),
    "Spark": lambda _, tls, endpoints: RemoteLog(
        endpoints, "s", ca=str(tls.ca), cert=str(tls.cert), key=str(tls.key)
    ),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1", "127.0.0.1:99999", "127.0.0.1:abc", "https://127.0.0.1:5002"]
)
def test_malformed_endpoint_is_rejected_at_call_before_any_file_is_created(
    taker: str, endpoint: str, tmp_path: Path, tls: TLS
) -> None:
    with pytest.raises(rt.InvalidOption, match="at endpoints"):
        TAKERS[taker](tmp_path, tls, ["127.0.0.1:1", endpoint])
    assert not list(tmp_path.iterdir())


def test_malformed_member_address_is_rejected() -> None:
    with pytest.raises(BadSetting, match="invalid address: the port is missing: got 'n1', expected"):
        ClusterMember(raft="n1:7000", data="n1")
