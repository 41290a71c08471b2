"""The option `--endpoints` of the commands that talk to nodes."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rt.cli.endpoints import NodeOptions
from rt.cli.main import cli
from rt.errors import InvalidOption
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity

NODE_COMMANDS = ("export", "pub", "pull", "push", "rest", "status", "sub")


@pytest.mark.parametrize("command", NODE_COMMANDS)
def test_cluster_commands_share_connection_options(command: str) -> None:
    found = CliRunner().invoke(cli, [command, "--help"]).output
    for name in ("--endpoints HOST:PORT,...", "--ca FILE", "--cert FILE", "--key FILE"):
        assert name in found


@pytest.mark.parametrize("command", ["rest", "status"])
def test_malformed_endpoint_exits_with_2(command: str) -> None:
    arguments = ["/status"] if command == "rest" else []
    result = CliRunner().invoke(cli, [command, *arguments, "--endpoints", "n1", "--insecure"])
    assert (result.exit_code, "the port is missing (at --endpoints): got 'n1'" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/x", "--data", "{"], "--data is not valid JSON: Expecting"),
        (["/x", "--data", "[" * 100_000], "--data is not valid JSON: nested too deep"),
        (["/x", "--data", '"\udcff"'], "--data is not valid UTF-8, from character 1 on"),
        (["/x\udcff"], "TARGET is not valid UTF-8, from character 2 on"),
    ],
    ids=["no JSON", "nested", "data that is not UTF-8", "target that is not UTF-8"],
)
def test_rest_with_invalid_json_or_utf8_exits_with_2(arguments: list[str], said: str) -> None:
    nodes = ["--endpoints", "localhost:1", "--insecure", "--connect-timeout", "0.1"]
    result = CliRunner().invoke(cli, ["rest", *arguments, *nodes])
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("command", ["pub", "sub"])
def test_endpoints_variable_accepts_list_of_endpoints(command: str) -> None:
    result = CliRunner().invoke(
        cli, [command, "--path", ".", "--stream", "s"], env={f"RT_{command.upper()}_ENDPOINTS": "n1:1,n2:1"}
    )
    assert (result.exit_code, "--endpoints needs --ca, --cert and --key" in result.stderr) == (2, True)


def test_node_options_without_endpoints_return_no_endpoints_and_no_tls() -> None:
    assert NodeOptions("publisher").parse() == ((), None)
    assert NodeOptions("publisher", endpoints="").parse() == ((), None)


def test_missing_node_options_are_read_from_sources_of_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_ca(tmp_path)
    for role, name in (("publisher", "feed1"), ("publisher", "feed2"), ("operator", "ops")):
        issue(tmp_path, Identity("trades", role, name))
    monkeypatch.setenv("RT_URL", f"rt://a:1,b:2/trades?tls_dir={tmp_path}&path=/logs")
    endpoints, tls = NodeOptions("operator", is_required=True).parse()
    assert (endpoints, tls and tls.identity.name) == (("a:1", "b:2"), "ops")
    publisher = NodeOptions("publisher", endpoints="c:3")
    assert (publisher.path(None), publisher.path("/p"), publisher.stream(None)) == ("/logs", "/p", "trades")
    endpoints, tls = publisher.parse("feed2")
    assert (endpoints, tls and tls.identity.name) == (("c:3",), "feed2")
    with pytest.raises(InvalidOption, match="several certificates"):
        publisher.parse()
    assert NodeOptions("publisher", endpoints="").parse() == ((), None)
    with pytest.raises(InvalidOption, match="no such profile"):
        NodeOptions("operator", profile="prod").parse()


def test_missing_required_option_raises_usage_error_if_no_source_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for options, ask, missing in (
        (NodeOptions("publisher"), NodeOptions.path, "--path"),
        (NodeOptions("publisher"), NodeOptions.stream, "--stream"),
        (NodeOptions("operator", is_required=True), NodeOptions.parse, "--endpoints"),
    ):
        with pytest.raises(click.UsageError, match=f"Missing option '{missing}'"):
            ask(options, None)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert NodeOptions("publisher", endpoints="a:1").path(None) == "/state/rt"
