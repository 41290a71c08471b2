"""Settings of a node: precedence of their sources, rejected values, and the error messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sequencer.config.config import BadSetting, ClusterMember, NodeConfig
from sequencer.config.config_loader import KEYS, node_config
from sequencer.state.configuration import CONFIGURABLE

CWD = "/srv/here"
FLAGS: Mapping[str, Any] = {
    "stream": "s",
    "name": "n1",
    "directory": "/d",
    "members": ("n1=h1:7001,h1:5001",),
    "ca": "/c/ca.crt",
    "cert": "/c/n1.crt",
    "key": "/c/n1.key",
}
TOML = """
stream = "s"
name = "n1"
directory = "data"
ca = "ca.crt"
cert = "/c/n1.crt"
key = "../n1.key"
bootstrap = true
rest_port = 0
log_level = "debug"
[members.n1]
raft = "h1:7000"
data = "[::1]:5002"
[members.n2]
raft = "h2:7000"
data = "h2:5002"
[members.n3]
raft = "h3:7000"
data = "h3:5002"
"""
THREE = "n1=h1:7000,h1:5002; n2=h2:7000,h2:5002;n3=h3:7000,h3:5002;"


def config(**changes: Any) -> NodeConfig:
    return node_config({**FLAGS, **changes}, {}, CWD)


def file_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return str(path)


def refusal(
    flags: Mapping[str, Any] = FLAGS, environment: Mapping[str, str] | None = None, **changes: Any
) -> BadSetting:
    with pytest.raises(BadSetting) as caught:
        node_config({**flags, **changes}, environment or {}, CWD)
    return caught.value


# Valid settings


def test_flags_alone_configure_node_with_ports_of_its_own_address() -> None:
    assert config() == NodeConfig(
        stream="s",
        name="n1",
        directory="/d",
        members={"n1": ClusterMember("h1:7001", "h1:5001")},
        ca="/c/ca.crt",
        cert="/c/n1.crt",
        key="/c/n1.key",
        raft_port=7001,
        data_port=5001,
    )


def test_environment_variables_alone_configure_node() -> None:
    environment = {
        "RT_STREAM": "s",
        "RT_NAME": "n2",
        "RT_DIRECTORY": "data",
        "RT_MEMBERS": THREE,
        "RT_CA": "ca",
        "RT_CERT": "cert",
        "RT_KEY": "key",
        "RT_BOOTSTRAP": "Yes",
        "RT_LISTEN": "::1",
        "RT_RAFT_PORT": "7001",
        "RT_HEALTH_PORT": "0",
        "RT_LOG_FORMAT": "JSON",
        "RT_PORT": "tcp://10.0.0.1:80",
        "RT_REST_PORT": "",
    }
    made = node_config({}, environment, CWD)
    assert (made.name, made.peers) == ("n2", ["n1", "n3"])
    assert (made.directory, made.ca) == (f"{CWD}/data", f"{CWD}/ca")
    assert (made.bootstrap, made.listen, made.log_format) == (True, "::1", "json")
    assert (made.raft_port, made.data_port, made.rest_port, made.health_port) == (7001, 5002, 6000, 0)


def test_config_file_alone_configures_node_with_paths_relative_to_file(tmp_path: Path) -> None:
    made = node_config({}, {"RT_CONFIG": file_of(tmp_path, TOML)}, CWD)
    assert made.directory == str(tmp_path / "data")
    assert (made.ca, made.cert) == (str(tmp_path / "ca.crt"), "/c/n1.crt")
    assert made.key == str(tmp_path.parent / "n1.key")
    assert made.members["n1"] == ClusterMember(raft="h1:7000", data="[::1]:5002")
    assert (made.bootstrap, made.rest_port, made.log_level) == (True, 0, "debug")


def test_flags_override_variables_then_file_then_defaults(tmp_path: Path) -> None:
    path = file_of(
        tmp_path, TOML.replace("rest_port = 0", "rest_port = 1\nhealth_port = 1\ndata_port = 1001")
    )
    environment = {"RT_REST_PORT": "2", "RT_HEALTH_PORT": "2", "RT_CONFIG": "/nowhere"}
    made = node_config({"config": path, "rest_port": "3", "bootstrap": False}, environment, CWD)
    assert (made.rest_port, made.health_port, made.data_port, made.raft_port) == (3, 2, 1001, 7000)
    assert made.bootstrap is False


def test_variable_with_command_name_overrides_general_variable() -> None:
    made = node_config(FLAGS, {"RT_REST_PORT": "tcp://10.0.0.7:6000", "RT_NODE_REST_PORT": "6001"}, CWD)
    assert made.rest_port == 6001


def test_roll_and_retention_settings_enter_replicated_configuration(tmp_path: Path) -> None:
    assert config().replicated == {}
    lines = "roll_minutes = 60\nretention_bytes = '90Gi'\nhold_bytes_max = 0\nrest_port = 0"
    environment = {"RT_CONFIG": file_of(tmp_path, TOML.replace("rest_port = 0", lines))}
    environment |= {"RT_RETENTION_DISK_PERCENT": "0", "RT_NODE_ROLL_BYTES": "1.5Mi", "RT_ROLL_BYTES": "7"}
    made = node_config({"retention_minutes": "5"}, environment, CWD)
    assert made.replicated == {
        "roll_bytes": 3 << 19,
        "roll_minutes": 60,
        "retention_minutes": 5,
        "retention_bytes": 90 << 30,
        "retention_disk_percent": 0,
        "hold_bytes_max": 0,
    }
    assert set(made.replicated) <= set(CONFIGURABLE)
    assert NodeConfig.from_json(made.to_json()) == made


def test_member_flags_replace_all_members_of_config_file(tmp_path: Path) -> None:
    made = node_config(
        {"config": file_of(tmp_path, TOML), "members": ("n1=a:1,a:2", "n4=b:1,b:2", "n5=c:1,c:2")}, {}, CWD
    )
    assert sorted(made.members) == ["n1", "n4", "n5"]


def test_every_config_field_has_setting_key() -> None:
    assert set(KEYS) == set(NodeConfig.__struct_fields__)


_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True)


@given(st.sets(_names, min_size=3, max_size=3), st.sampled_from(("h", "10.0.0.1", "[::1]")))
def test_members_parse_equally_from_flags_and_variable(names: set[str], host: str) -> None:
    members = {
        name: ClusterMember(f"{host}:{2 * i + 1}", f"{host}:{2 * i + 2}") for i, name in enumerate(names)
    }
    spelled = [f"{name}={member.raft},{member.data}" for name, member in members.items()]
    given = {**FLAGS, "name": min(names), "members": tuple(spelled)}
    by_flags = node_config(given, {}, CWD)
    del given["members"]
    by_variable = node_config(given, {"RT_MEMBERS": " ; ".join(spelled)}, CWD)
    assert by_flags.members == by_variable.members == members


@given(
    st.builds(
        config,
        stream=_names,
        directory=st.sampled_from(("/d", "d d", "ü/\\")),
        bootstrap=st.booleans(),
        listen=st.sampled_from(("", "localhost", "127.0.0.1", "::1")),
        rest_port=st.sampled_from(("0", "1", "65535")),
    )
)
def test_config_survives_round_trip_through_one_line_of_json(made: NodeConfig) -> None:
    text = made.to_json()
    assert "\n" not in text
    assert NodeConfig.from_json(text) == made


# Rejected settings

_LONG = "/" + "d" * 92  # With "/control" it has 101 bytes.


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("stream", "a/b", "not a valid name for a stream (at --stream): got 'a/b'"),
        ("name", "", "not a valid name for a node (at --name): got ''"),
        ("name", "n2", "the node is not a member (at --name): got 'n2', expected n1"),
        ("directory", "", "the path is empty (at --directory)"),
        ("directory", _LONG, "(at --directory): got 101 bytes"),
        ("members", ("n1=h:1,h:2", "n1=i:1,i:2"), "a member is named twice (at --member): got 'n1'"),
        ("members", ("n1=h:1,h:1",), "an address is used twice (at --member): got h:1"),
        ("members", ("n1=h:1",), "invalid member (at --member): got 'n1=h:1', expected name=host:raft port"),
        (
            "members",
            ("n1=h:1,h:70000",),
            "invalid address: the port is not a number from 1 to 65535 (at --member): got 'h:70000'",
        ),
        (
            "members",
            ("n1=::1:7,h:2",),
            "invalid address: the port is missing, or an IPv6 address is not in brackets (at --member)",
        ),
        ("members", ("n 1=h:1,h:2",), "not a valid name for a node (at --member): got 'n 1'"),
        ("listen", "host", "invalid address to listen on (at --listen): got 'host'"),
        ("data_port", "0", "invalid port (at --data-port): got '0', expected a whole number from 1 to 65535"),
        ("raft_port", "-1", "invalid port (at --raft-port): got '-1'"),
        (
            "rest_port",
            "65536",
            "invalid port (at --rest-port): got '65536', expected a whole number from 0 to",
        ),
        ("rest_port", "²", "invalid port (at --rest-port)"),
        ("rest_port", "8080", "the port is used twice (at rest_port and health_port): got 8080"),
        (
            "roll_bytes",
            "0",
            "invalid size (at --roll-bytes): got '0', expected bytes, or a number with a unit",
        ),
        ("retention_bytes", "90 cows", "invalid size (at --retention-bytes): got '90 cows'"),
        ("hold_bytes_max", "-1", "invalid size (at --hold-bytes-max): got '-1'"),
        (
            "retention_disk_percent",
            "101",
            "(at --retention-disk-percent): got '101', expected a whole number fro",
        ),
        ("retention_minutes", "-1", "(at --retention-minutes): got '-1', expected a whole number from"),
        ("roll_minutes", "1h", "(at --roll-minutes): got '1h', expected a whole number from 0 to 42949672"),
        ("log_level", "loud", "(at --log-level): got 'loud', expected debug or info or warning or error"),
        ("log_format", "xml", "(at --log-format): got 'xml', expected text or json"),
    ],
)
def test_invalid_flag_is_named_with_given_and_expected_value(key: str, value: object, words: str) -> None:
    assert words in str(refusal(**{key: value}))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rest_port = '1'", "invalid port (at {path}, key rest_port): got '1', expected a whole number"),
        ("rest_port = true", "invalid port (at {path}, key rest_port): got True"),
        ("rest_port = 1.0", "invalid port (at {path}, key rest_port): got 1.0"),
        (
            "retention_bytes = 1.5",
            "invalid size (at {path}, key retention_bytes): got 1.5, expected bytes, or a num",
        ),
        ("retention_bytes = true", "invalid size (at {path}, key retention_bytes): got True"),
        (
            "retention_disk_percent = '90'",
            "(at {path}, key retention_disk_percent): got '90', expected a whole",
        ),
        ("bootstrap = 1", "neither true nor false (at {path}, key bootstrap): got 1"),
        ("listen = 1", "not a text (at {path}, key listen): got 1, expected a string"),
        ("members = 'n1=h:1,h:2'", "not a table of members (at {path}, key members)"),
        ("members.n1 = 'h:1'", "invalid member (at {path}, key members.n1): got 'h:1'"),
        ("members.n1.raft = 'h:1'", "invalid address (at {path}, key members.n1.data): got None"),
        (
            "members.n1.address = 'h:1'",
            "(at {path}, key members.n1): got 'address', expected one of raft",
        ),
        ("membres = 1", "unknown key (at {path}): got 'membres', expected one of stream, name,"),
        ("stream = 's'\nstream = 's'", "the settings file is not valid TOML (at {path})"),
    ],
)
def test_invalid_key_in_config_file_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = file_of(tmp_path, line)
    flags = {key: value for key, value in FLAGS.items() if key != "members"}
    assert words.format(path=path) in str(refusal(flags, config=path))


def test_missing_binary_or_oversized_config_file_is_rejected(tmp_path: Path) -> None:
    error = refusal(config=str(tmp_path / "none.toml"))
    assert (error.where, error.got) == (str(tmp_path / "none.toml"), "No such file or directory")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert refusal(config=str(tmp_path / "bytes.toml")).where == str(tmp_path / "bytes.toml")
    assert refusal(config="/dev/zero").got == "more than 1048576 bytes"


def test_unknown_key_in_config_file_lists_all_known_keys(tmp_path: Path) -> None:
    error = refusal(config=file_of(tmp_path, "x = 1"))
    assert all(key in str(error.expected) for key in KEYS)


def test_missing_settings_are_all_named_in_one_error() -> None:
    error = refusal({"stream": "s"})
    assert error.where == "name, directory, members, ca, cert, key"


def test_kubernetes_service_link_variable_is_explained_in_error() -> None:
    error = refusal(environment={"RT_DATA_PORT": "tcp://10.0.0.7:5002"})
    assert error.where == "RT_DATA_PORT"
    assert "enableServiceLinks" in str(error)
    assert "RT_NODE_DATA_PORT" in str(error)


@pytest.mark.parametrize("secret", ["-----BEGIN PRIVATE KEY-----", "MIGHAgEAMBMGByqGSM49\nAgEGCCqGSM49"])
def test_private_key_in_place_of_its_path_is_not_shown_in_error(secret: str) -> None:
    flags = {key: value for key, value in FLAGS.items() if key != "key"}
    error = refusal(flags, {"RT_KEY": secret})
    assert error.where == "RT_KEY"
    assert secret[:20] not in repr(vars(error)) + str(error)


@pytest.mark.parametrize("part", ["file", "directory", "working directory"])
def test_path_with_invalid_utf8_is_rejected_with_its_option(part: str) -> None:
    strange = "/srv/caf\udce9"
    flags = {**FLAGS, **({"config": f"{strange}/n1.toml"} if part == "file" else {"directory": "data"})}
    with pytest.raises(BadSetting, match="the path is not valid UTF-8") as caught:
        node_config({**flags, **({"directory": strange} if part == "directory" else {})}, {}, strange)
    assert caught.value.where == ("--config" if part == "file" else "--directory")


def test_two_members_are_accepted_only_without_bootstrap() -> None:
    two = ("n1=h1:7001,h1:5001", "n2=h2:7001,h2:5001")
    assert sorted(config(members=two).members) == ["n1", "n2"]
    with pytest.raises(BadSetting, match=r"got 2 members, expected 1, 3, 5 or 7. A node that"):
        config(members=two, bootstrap=True)
