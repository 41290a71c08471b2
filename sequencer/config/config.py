"""The settings of a node. Pure: `config_loader` reads options, environment and file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final

import msgspec
from msgspec import Struct

from rt.endpoints import Endpoint, parse_endpoint
from rt.errors import InvalidName, InvalidOption
from rt.names import check_name
from sequencer.raft.model.config import CLUSTER_SIZES
from sequencer.state.configuration import CONFIGURABLE

DATA_PORT: Final = 5002
RAFT_PORT: Final = 7000
REST_PORT: Final = 6000
HEALTH_PORT: Final = 8080
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")
SOCKET_PATH_BYTES: Final = 100
"""Limit for the path of a Unix socket: Linux allows 107 bytes, other systems fewer."""


class BadSetting(InvalidOption):
    """An invalid setting. `where`: the option, variable or key of a file that set it."""


class ClusterMember(Struct, frozen=True):
    raft: str
    """host:port of its Raft transport."""
    data: str
    """host:port of its gRPC server."""

    def __post_init__(self) -> None:
        check_address(self.raft)
        check_address(self.data)


class NodeConfig(Struct, frozen=True):
    """The settings of one node. Paths are absolute; `members` is the same on all nodes. Raises
    `BadSetting`.
    """

    stream: str
    name: str
    directory: str
    members: Mapping[str, ClusterMember]
    """By name; 1, 3, 5 or 7 of them, including this node."""
    ca: str
    cert: str
    key: str
    bootstrap: bool = False
    """Make a new cluster if every member is blank."""
    listen: str = ""
    """IP address to listen on, for all ports. "": all addresses."""
    data_port: int = DATA_PORT
    raft_port: int = RAFT_PORT
    rest_port: int = REST_PORT
    """0: none."""
    health_port: int = HEALTH_PORT
    """0: none."""
    log_level: str = "info"
    log_format: str = "text"
    # Replicated settings (`sequencer.state.state.Configuration`). None: this node does not set them.
    roll_bytes: int | None = None
    roll_minutes: int | None = None
    retention_minutes: int | None = None
    retention_bytes: int | None = None
    retention_disk_percent: int | None = None
    hold_bytes_max: int | None = None

    def __post_init__(self) -> None:
        check_member_name(self.stream, kind="stream")
        check_members(self.members, is_whole=self.bootstrap)
        if self.name not in self.members:
            raise BadSetting(
                "the node is not a member",
                where="name",
                got=repr(self.name)[:200],
                expected=" or ".join(sorted(self.members)),
            )
        for field in ("directory", "ca", "cert", "key"):
            if not os.path.isabs(getattr(self, field)):
                raise BadSetting("the path is not absolute", where=field, got=repr(getattr(self, field)))
        check_listen(self.listen)
        self._check_ports()
        size = len(os.fsencode(self.control_socket))
        if size >= SOCKET_PATH_BYTES:
            raise BadSetting(
                "the directory's path is too long for the Unix socket in it",
                where="directory",
                got=f"{size} bytes in {self.control_socket}",
                expected=f"fewer than {SOCKET_PATH_BYTES}",
                hint="Set directory to a shorter path.",
            )
        self._check_replicated()
        if self.log_level not in LOG_LEVELS or self.log_format not in LOG_FORMATS:
            raise BadSetting("unknown log level or format", got=f"{self.log_level!r}, {self.log_format!r}")

    def _check_ports(self) -> None:
        ports: dict[int, str] = {}
        for field in ("data_port", "raft_port", "rest_port", "health_port"):
            port = getattr(self, field)
            is_optional = field in {"rest_port", "health_port"}
            if not (0 if is_optional else 1) <= port <= 65535:
                raise BadSetting("invalid port", where=field, got=port, expected="1 to 65535")
            if port and port in ports:
                raise BadSetting("the port is used twice", where=f"{ports[port]} and {field}", got=port)
            ports[port] = field

    def _check_replicated(self) -> None:
        for field in REPLICATED:
            value, (least, end) = getattr(self, field), CONFIGURABLE[field]
            if value is not None and not least <= value < end:
                expected = f"{least} to {end - 1}"
                raise BadSetting("out of range", where=field, got=value, expected=expected)

    @property
    def replicated(self) -> dict[str, int]:
        """The replicated settings that this node sets."""
        return {name: value for name in REPLICATED if (value := getattr(self, name)) is not None}

    @property
    def raft_directory(self) -> str:
        return os.path.join(self.directory, "raft")

    @property
    def sessions_directory(self) -> str:
        """The session replicas, one directory for each session id."""
        return os.path.join(self.directory, self.stream, "sessions")

    @property
    def merged_directory(self) -> str:
        return os.path.join(self.directory, self.stream, "merged")

    @property
    def control_socket(self) -> str:
        """The Unix socket between the node's two processes. Its path must be short."""
        return os.path.join(self.directory, "control")

    @property
    def lock_file(self) -> str:
        """Locked by the node that runs on the directory."""
        return os.path.join(self.directory, "lock")

    @property
    def peers(self) -> list[str]:
        return sorted(set(self.members) - {self.name})

    def to_json(self) -> str:
        """One line, with paths of secrets but no secrets."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> NodeConfig:
        return msgspec.json.decode(text, type=cls)


REPLICATED: Final = (
    "roll_bytes",
    "roll_minutes",
    "retention_minutes",
    "retention_bytes",
    "retention_disk_percent",
    "hold_bytes_max",
)
"""The settings of a node that are replicated, named as in the replicated configuration."""


def check_address(address: str) -> Endpoint:
    """Host and port of a member; `BadSetting` if the address is malformed."""
    try:
        return parse_endpoint(address)
    except InvalidOption as error:
        raise BadSetting(f"invalid address: {error.what}", got=error.got, expected=error.expected) from error


def check_member_name(name: str, *, kind: str = "node") -> str:
    """Return `name`; `BadSetting` if it is not a valid name."""
    try:
        return check_name(name, kind=kind)
    except InvalidName as error:
        raise BadSetting(error.what, where=kind, got=error.got, hint=error.hint) from error


def check_members(members: Mapping[str, ClusterMember], *, is_whole: bool) -> None:
    """`BadSetting` for an invalid name, and for an address that is used twice.

    If `is_whole`, the members are for a new cluster, so there must be 1, 3, 5 or 7 members.
    """
    if is_whole and len(members) not in CLUSTER_SIZES:
        raise BadSetting(
            "invalid number of members for a new cluster",
            where="members",
            got=f"{len(members)} members",
            expected="1, 3, 5 or 7",
            hint="A node that joins a cluster later needs bootstrap = false.",
        )
    addresses: dict[str, str] = {}
    for name, member in members.items():
        check_member_name(name)
        for address in (member.raft, member.data):
            if address in addresses:
                where = f"members {addresses[address]} and {name}"
                raise BadSetting("an address is used twice", where=where, got=address)
            addresses[address] = name


def check_listen(address: str) -> str:
    """Return `address`; `BadSetting` unless it is "", "localhost" or an IP address."""
    if address not in {"", "localhost"}:
        try:
            ip_address(address)
        except ValueError:
            raise BadSetting(
                "invalid address to listen on",
                where="listen",
                got=repr(address)[:200],
                expected="an IP address of this machine, or nothing for all",
            ) from None
    return address
