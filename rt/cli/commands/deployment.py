"""`rt systemd` and `rt dashboards`: write the files that run rt as a service and watch it."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Final

import click

from rt.cli.formats.new_files import write_new_files
from rt.cli.options import option
from rt.errors import InvalidOption

_UNIT: Final = """\
[Unit]
Description={description}
After=network-online.target
Wants=network-online.target
# Never give up: what stops it may be fixed in an hour.
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
{start}
# It has not reported for this long: one of its processes hangs. It is stopped as usual, and started again.
WatchdogSec=120
WatchdogSignal=SIGTERM
DynamicUser=no
User=rt
Group=rt
UMask=0027
{command}
Restart=on-failure
RestartSec=5
{exits}
KillMode=mixed
{limits}
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
ReadWritePaths=/var/lib/rt
PrivateTmp=yes
PrivateDevices=yes
ProtectControlGroups=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictSUIDSGID=yes
LockPersonality=yes

[Install]
WantedBy=multi-user.target
"""
_CLIENT_EXITS: Final = """\
# 2: wrong options. 130 and 143: stopped by a signal.
RestartPreventExitStatus=2
SuccessExitStatus=130 143"""
_CLIENT_START: Final = "# It is up when its settings are accepted. Nodes may be away then."
_CLIENT_LIMITS: Final = "TimeoutStopSec=30\nLimitNOFILE=65536"

UNITS: Final = {
    "node": (
        "rt-node.service",
        {
            "description": "rt node",
            "start": "# It is up when both of its processes serve, with or without other nodes.\n"
            "# Time for opening a large log.\nTimeoutStartSec=900",
            "command": "ExecStart={program} node --config /etc/rt/node.toml --log-format json",
            "exits": "# 2: wrong settings. 71: its data differs from that of the others, kept for analysis.\n"
            "RestartPreventExitStatus=2 71",
            "limits": "# Its two processes have 10 seconds each to end.\nTimeoutStopSec=30\n"
            "# Five descriptors for each session.\nLimitNOFILE=65536",
        },
    ),
    "push": (
        "rt-push@.service",
        {
            "description": "rt push of %i",
            "start": _CLIENT_START,
            "command": "# DIRECTORY, RT_PUSH_STREAM, RT_ENDPOINTS, RT_CA, RT_CERT, RT_KEY\n"
            "EnvironmentFile=/etc/rt/push-%i.env\nExecStart={program} push ${{DIRECTORY}}",
            "exits": _CLIENT_EXITS,
            "limits": _CLIENT_LIMITS,
        },
    ),
    "pull": (
        "rt-pull@.service",
        {
            "description": "rt pull of %i",
            "start": _CLIENT_START,
            "command": "# DIRECTORY, RT_PULL_STREAM, RT_ENDPOINTS, RT_CA, RT_CERT, RT_KEY\n"
            "EnvironmentFile=/etc/rt/pull-%i.env\nExecStart={program} pull ${{DIRECTORY}}",
            "exits": _CLIENT_EXITS,
            "limits": _CLIENT_LIMITS,
        },
    ),
}
"""File and fields of each unit."""


@click.command()
@option(
    "--out",
    "directory",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to write to, such as /etc/systemd/system. It is created if it does not exist.",
)
@option("--unit", type=click.Choice([*UNITS, "all"]), default="all", help="Which unit to write.")
@option("--force", is_flag=True, help="Replace files that exist and differ. Default: fail.")
def systemd(directory: Path, unit: str, force: bool) -> None:
    """Write systemd units: rt-node.service, rt-push@.service and rt-pull@.service.

    They run this installation of rt as the user rt, with data in /var/lib/rt and settings in /etc/rt:
    node.toml of the node, and push-NAME.env or pull-NAME.env for rt-push@NAME or rt-pull@NAME. To change
    one, use `systemctl edit`.
    """
    chosen = list(UNITS) if unit == "all" else [unit]
    program = Path(sys.executable).absolute().parent / "rt"
    contents = {directory / UNITS[name][0]: unit_text(name, program).encode() for name in chosen}
    write_new_files(contents, force=force)


def unit_text(name: str, program: Path) -> str:
    """The text of a unit of `UNITS`. `rt.InvalidOption` if systemd could not start `program`."""
    if set(str(program)) & set(" \t\n\"'\\%$;"):
        raise InvalidOption(
            "systemd cannot start a program with such a path",
            where=program,
            expected="a path without spaces, quotes, backslashes and the characters % $ ;",
            hint="Install rt in another directory, such as /opt/rt.",
        )
    fields = {key: text.format(program=program) for key, text in UNITS[name][1].items()}
    return _UNIT.format(**fields)


MONITORING_FILES: Final = {
    "rt.json": "dashboards",
    "rt-streams.json": "dashboards",
    "rt.rules.yaml": "alerts",
}
"""Each file, and the folder of `helm/` in which it is kept in a checkout."""


@click.command()
@option(
    "--out",
    "directory",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to write to. It is created if it does not exist.",
)
@option("--force", is_flag=True, help="Replace files that exist and differ. Default: fail.")
def dashboards(directory: Path, force: bool) -> None:
    """Write the Grafana dashboards (rt.json, rt-streams.json) and the Prometheus alert rules (rt.rules.yaml).

    Import the dashboards into Grafana: rt.json is of nodes, rt-streams.json of hosts of streams. Name
    rt.rules.yaml under rule_files in Prometheus.
    """
    write_new_files({directory / name: monitoring_file(name) for name in MONITORING_FILES}, force=force)


def monitoring_file(name: str) -> bytes:
    """Read one of `MONITORING_FILES`: from the installed package, or from `helm/` in a checkout."""
    installed = resources.files("rt.cli").joinpath("monitoring", name)
    if installed.is_file():
        return installed.read_bytes()
    return (Path(__file__).parents[3] / "helm" / MONITORING_FILES[name] / name).read_bytes()
