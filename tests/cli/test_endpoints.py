"""The option `--endpoints` of the commands that talk to nodes."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rt.cli.endpoints import NodeOptions
from rt.cli.main import cli

NODE_COMMANDS = ("export", "pub", "pull", "push", "rest", "status", "sub")


@pytest.mark.parametrize("command", NODE_COMMANDS)
def test_every_command_that_talks_to_nodes_has_the_same_options(command: str) -> None:
    found = CliRunner().invoke(cli, [command, "--help"]).output
    for name in ("--endpoints HOST:PORT,...", "--ca FILE", "--cert FILE", "--key FILE"):
        assert name in found


@pytest.mark.parametrize("command", ["rest", "status"])
def test_a_malformed_endpoint_is_misuse(command: str) -> None:
    arguments = ["/status"] if command == "rest" else []
    result = CliRunner().invoke(cli, [command, *arguments, "--endpoints", "n1", "--insecure"])
    assert (result.exit_code, "the port is missing (at --endpoints): got 'n1'" in result.stderr) == (2, True)


@pytest.mark.parametrize("command", ["pub", "sub"])
def test_the_variable_takes_the_same_list(command: str) -> None:
    result = CliRunner().invoke(
        cli, [command, "--path", ".", "--stream", "s"], env={f"RT_{command.upper()}_ENDPOINTS": "n1:1,n2:1"}
    )
    assert (result.exit_code, "--endpoints needs --ca, --cert and --key" in result.stderr) == (2, True)


def test_without_endpoints_nothing_leaves_this_machine() -> None:
    assert NodeOptions(None, None, None, None).parse() == ((), None)
    assert NodeOptions("", None, None, None).parse() == ((), None)
