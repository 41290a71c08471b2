"""`rt node`: run one node of a stream's cluster in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rt.cli.formats.new_files import write_new_files
from rt.cli.options import option
from rt.errors import CertificateError
from rt.net.tls import TLS
from sequencer.config import logging_setup
from sequencer.config.config import (
    DATA_PORT,
    HEALTH_PORT,
    LOG_FORMATS,
    LOG_LEVELS,
    RAFT_PORT,
    REST_PORT,
    BadSetting,
    NodeConfig,
)
from sequencer.config.config_loader import MEMBER_FORM, given_values, node_config
from sequencer.config.config_template import config_template
from sequencer.node.startup_check import check_directories, check_ports
from sequencer.node.supervisor import lock_directory, supervise

# `config_loader` reads the environment variables, and names them in its errors.
_setting = partial(option, allow_from_autoenv=False)
_file = partial(_setting, metavar="FILE")
_port = partial(_setting, metavar="PORT")
_size = partial(_setting, metavar="SIZE")


@click.command()
@_file(
    "--config",
    help="TOML file with these settings. The keys are the option names with _ for -. Default: no file.",
)
@click.option(
    "--init",
    is_flag=True,
    help="Write a commented file for --config, and end. Given options and variables become its values.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    allow_from_autoenv=False,
    help="With --init: the file to write. Default: stdout.",
)
@click.option(
    "--force", is_flag=True, help="With --init: replace a file that exists and differs. Default: fail."
)
@_setting("--stream", metavar="NAME", help="Name of the stream. Required.")
@_setting(
    "--name", metavar="NAME", help="Name of this member; it must be the name in its certificate. Required."
)
@_setting(
    "--directory",
    metavar="DIR",
    help="Directory for all data of the node. It is created if it does not exist. Required.",
)
@_setting(
    "--member",
    "members",
    multiple=True,
    metavar=MEMBER_FORM.replace(" ", "-"),
    help="A member of the cluster with its Raft and gRPC addresses. To make a cluster, give all 1, 3, 5 or 7 "
    "members, this one too, the same on all nodes. A node that joins later gives itself and a member. "
    "RT_MEMBERS separates members by ';'. The file has a table for each: [members.n1] with raft and data. "
    "Required.",
)
@_file("--ca", help="PEM file of the CA that signed all certificates of the stream. Required.")
@_file("--cert", help="PEM file of the certificate of this node. Required.")
@_file("--key", help="PEM file of the private key of this node. Required.")
@_setting(
    "--bootstrap/--no-bootstrap",
    default=None,
    help="Create a new cluster if the directories of all members are empty. Not for a node that joins "
    "later, nor once the members were changed. Default: no.",
)
@_setting("--listen", metavar="IP", help="IP address to listen on, for all ports. Default: all addresses.")
@_port(
    "--data-port",
    help=f"Port of gRPC. Default: the port of the data address of this member (usually {DATA_PORT}).",
)
@_port(
    "--raft-port",
    help=f"Port of Raft. Default: the port of the raft address of this member (usually {RAFT_PORT}).",
)
@_port("--rest-port", help=f"Port of REST. 0: no REST. Default: {REST_PORT}.")
@_port("--health-port", help=f"Port of health checks and metrics. 0: none. Default: {HEALTH_PORT}.")
@_setting(
    "--log-level", metavar="|".join(LOG_LEVELS), help="Lowest level of log records on stderr. Default: info."
)
@_setting(
    "--log-format",
    metavar="|".join(LOG_FORMATS),
    help="Format of log records: key=value text or JSON. Default: text.",
)
@_size("--roll-bytes", help="Roll the merged log to a new segment at this size. Default: 1Gi.")
@_setting(
    "--roll-minutes",
    metavar="N",
    help="Roll the merged log to a new segment at this age. Minutes. 0, the default: not by age.",
)
@_setting(
    "--retention-minutes",
    metavar="N",
    help="Trim a merged segment this long after it was sealed. Minutes. 0: not by age. Default: 10080.",
)
@_size(
    "--retention-bytes",
    help="Trim the oldest segments if the merged log exceeds this size. 0, the default: no limit.",
)
@_setting(
    "--retention-disk-percent",
    metavar="N",
    help="Trim the oldest segments while the disks of a majority are fuller than this. Percent. "
    "0: not by disk. Default: 90.",
)
@_size(
    "--hold-bytes-max",
    help="Keep at most this size for named subscribers that have not acknowledged it. "
    "0: keep nothing for them. Default: 10Gi.",
)
@click.pass_context
def node(ctx: click.Context, /, init: bool, out: Path | None, force: bool, **flags: Any) -> None:
    """Run a node: consensus, session replicas, the merged log.

    Options take precedence over RT_NODE_... variables, these over RT_... variables, these over the file,
    and the file over defaults. The settings of rolling, retention and holds belong to the cluster: a leader
    applies those that its node sets. They stay until another leader or an operator changes them.

    The node runs until SIGTERM or SIGINT. Exit status 0: it was stopped. 1: it cannot start or continue. 2:
    a setting is wrong. 71: its data differs from that of the other nodes.
    """
    if not init and (out is not None or force):
        raise click.UsageError("--out and --force need --init.", ctx)
    try:
        if init:
            _write_template(_given(ctx, flags), out, force=force)
            return
        config = node_config(_given(ctx, flags), os.environ, os.getcwd())
    except BadSetting as error:
        raise click.UsageError(str(error), ctx) from error
    logging_setup.configure("node", config.log_level, config.log_format)
    check_certificate(config)
    lock = lock_directory(config)
    try:
        check_directories(config)
        check_ports(config)
        ctx.exit(supervise(config))
    finally:
        lock.close()


def _given(ctx: click.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """The options that were given. Options for logging are included also if they were given before `node`."""
    given = {key: value for key, value in flags.items() if value is not None and value != ()}
    before = ctx.parent
    for key in ("log_level", "log_format"):
        if before is not None and before.get_parameter_source(key) is ParameterSource.COMMANDLINE:
            given.setdefault(key, before.params[key])
    return given


def _write_template(given: dict[str, Any], out: Path | None, *, force: bool) -> None:
    if "config" in given:
        raise click.UsageError("--init excludes --config.")
    text = config_template(given_values(given, os.environ, os.getcwd()))
    if out is None:
        click.echo(text, nl=False)
    else:
        write_new_files({out: text.encode()}, force=force)


def check_certificate(config: NodeConfig) -> None:
    """`rt.CertificateError` unless the TLS files are valid and the certificate names this node."""
    identity = TLS(config.ca, config.cert, config.key).identity
    expected = f"rt://{config.stream}/node/{config.name}"
    if identity.uri != expected:
        raise CertificateError(
            "the certificate does not name this node",
            where=config.cert,
            got=identity.uri,
            expected=expected,
            hint="Change stream, name or cert. `rt certs issue --role node` makes a certificate.",
        )
