"""The commented file of settings that `rt node --init` writes. Pure.

Invariants:
- It names every setting, with its unit, its default and a reason to change it. Settings with a default are
  commented out, and the value shown is the default.
- `config_loader` reads from it the given values, and for the other settings in `REQUIRED` their examples.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rt.units import format_size
from sequencer.config.config import (
    DATA_PORT,
    HEALTH_PORT,
    LOG_FORMATS,
    LOG_LEVELS,
    RAFT_PORT,
    REST_PORT,
    ClusterMember,
)
from sequencer.state.configuration import Configuration

_HEAD: Final = """\
Settings of one node of rt. Start it with `rt node --config FILE`.

Lines without # are required: make them right for this node. A line with # shows a default. An option of
`rt node` and an RT_* variable take precedence over this file. Relative paths start in its directory.
"""
_MEMBERS: Final = """\
All members that make the cluster, this node too: 1, 3, 5 or 7, the same on all nodes. A node that joins
later (`rt member add`) names itself and a member or more. Once members have changed, the cluster's own list
counts, whatever stands here. The others and the clients
connect to these addresses; host names must be in the certificates (`rt certs issue --dns`, or --loopback).
raft: its Raft port, for nodes only. data: its gRPC port, for nodes and clients.

Several nodes on one machine: each of the four ports (raft, data, rest_port, health_port) and `directory` must
differ between them. For example:

  n1  raft 7001  data 5001  rest_port 6001  health_port 8081  directory /var/lib/rt/n1
  n2  raft 7002  data 5002  rest_port 6002  health_port 8082  directory /var/lib/rt/n2
  n3  raft 7003  data 5003  rest_port 6003  health_port 8083  directory /var/lib/rt/n3
"""
REQUIRED: Final[Mapping[str, Any]] = {
    "stream": "trades",
    "name": "n1",
    "directory": "/var/lib/rt",
    "ca": "/etc/rt/ca.crt",
    "cert": "/etc/rt/n1.crt",
    "key": "/etc/rt/n1.key",
    "bootstrap": True,
    "members": {
        f"n{number}": ClusterMember(
            f"node{number}.example.com:{RAFT_PORT}", f"node{number}.example.com:{DATA_PORT}"
        )
        for number in (1, 2, 3)
    },
}
"""Examples for the settings that the template sets."""
_SHARED: Final = Configuration()
DEFAULTS: Final[Mapping[str, Any]] = {
    "listen": "",
    "data_port": DATA_PORT,
    "raft_port": RAFT_PORT,
    "rest_port": REST_PORT,
    "health_port": HEALTH_PORT,
    "log_level": LOG_LEVELS[1],
    "log_format": LOG_FORMATS[0],
    **{
        name: getattr(_SHARED, name)
        for name in ("roll_minutes", "retention_minutes", "retention_disk_percent")
    },
    **{
        name: format_size(getattr(_SHARED, name))
        for name in ("roll_bytes", "retention_bytes", "hold_bytes_max")
    },
}
"""The values that the template shows for the other settings."""

SECTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "This node": {
        "stream": "Name of the stream. The certificates name it too. A cluster serves one stream.",
        "name": "Name of this node: a member below, and the name in its certificate.",
        "directory": "All data of the node: raft/ (consensus), STREAM/sessions/ (what publishers sent), "
        "STREAM/merged/ (the merged log), `lock` and `control` (a Unix socket, so the path must be short). "
        "No other node may use it. It needs a disk with a fast fsync.",
        "ca": "PEM file of the CA that signed all certificates of the stream.",
        "cert": "PEM file of the certificate of this node. A renewed file is read without a restart.",
        "key": "PEM file of its private key. Readable by the user of the node only.",
        "bootstrap": "Create the cluster if the directories of all members are empty. It may stay true until "
        "the members are changed: a node with an empty directory joins the cluster that the others have. "
        "Then set it to false: if all these nodes lost their disks, they would make another one. Default: "
        "false.",
    },
    "Ports": {
        "listen": "IP address to listen on, for all ports. Set it to keep the node off a network. Default: "
        "all addresses.",
        "data_port": "TCP port of gRPC, for clients and nodes. Set it if the node listens on another port "
        f"than the others connect to. Default: that of its `data` address below, usually {DATA_PORT}.",
        "raft_port": "TCP port of Raft, for nodes only. Set it for the same reason. Default: that of its "
        f"`raft` address below, usually {RAFT_PORT}.",
        "rest_port": "TCP port of REST and the status page, with client certificates, for operators. 0: "
        f"none. Default: {REST_PORT}.",
        "health_port": "TCP port of health checks and metrics, without certificates. 0: none. "
        f"Default: {HEALTH_PORT}.",
    },
    "Log": {
        "log_level": f"Lowest level on stderr: {', '.join(LOG_LEVELS)}. debug is for analysis only. "
        "Default: info.",
        "log_format": "text (key=value), or json for a program that collects logs. Default: text.",
    },
    "Of the whole cluster: the same on all nodes. A leader applies what its node sets": {
        "roll_bytes": "Size of a file of the merged log. Files are trimmed whole, so a smaller size trims "
        "more exactly. Bytes, or with a unit. Default: 1Gi.",
        "roll_minutes": "Age at which a file ends, so that a quiet stream can be trimmed. Minutes. 0: not by "
        "age. Default: 0.",
        "retention_minutes": "How long messages are kept. Minutes since their file ended. 0: not by age. "
        "Default: 10080, a week.",
        "retention_bytes": "Largest size of the merged log. Bytes, or with a unit. 0: no limit. Default: 0.",
        "retention_disk_percent": "The oldest files are trimmed while the disks of a majority are fuller "
        "than this. Percent. 0: not by disk, and a full disk stops the node. Default: 90.",
        "hold_bytes_max": "How much is kept for named subscribers that have not acknowledged it. Bytes, or "
        "with a unit. 0: nothing. Default: 10Gi.",
    },
}
"""The settings by section, each with its comment. `members` follows at the end, as TOML requires."""


def config_template(given: Mapping[str, Any]) -> str:
    """Return the file. The values in `given`, by key, replace examples and defaults."""
    return "\n".join(_lines(given))


def _lines(given: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"# {line}".rstrip() for line in _HEAD.splitlines())
    for title, settings in SECTIONS.items():
        yield from ("", f"# --- {title} ---")
        for key, why in settings.items():
            yield ""
            yield from textwrap.wrap(why, 108, initial_indent="# ", subsequent_indent="# ")
            if key in given or key in REQUIRED:
                yield f"{key} = {_toml(given.get(key, REQUIRED.get(key)))}"
            else:
                yield f"#{key} = {_toml(DEFAULTS[key])}"
    yield from ("", "# --- Members ---", "")
    yield from (f"# {line}".rstrip() for line in _MEMBERS.splitlines())
    for name, member in given.get("members", REQUIRED["members"]).items():
        yield from ("", f"[members.{_toml(name)}]")
        yield from (f"raft = {_toml(member.raft)}", f"data = {_toml(member.data)}")
    yield ""


def _toml(value: Any) -> str:
    """A string, number or boolean in TOML. JSON has the same form, if only ASCII characters are escaped."""
    return json.dumps(value, ensure_ascii=False)
