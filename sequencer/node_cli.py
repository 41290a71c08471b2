"""`rt node`: one node of a stream's cluster, in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from rt.cli.options import option
from rt.errors import CertificateError
from rt.net.tls import TLS
from sequencer import node_logs
from sequencer.config import (
    DATA_PORT,
    HEALTH_PORT,
    LOG_FORMATS,
    LOG_LEVELS,
    RAFT_PORT,
    REST_PORT,
    BadSetting,
    NodeConfig,
)
from sequencer.config_sources import MEMBER_FORM, node_config
from sequencer.supervisor import lock_directory, supervise

# `config_sources` knows the variables, and says in its errors which one it was.
_setting = partial(option, allow_from_autoenv=False)
_file = partial(_setting, metavar="FILE")
_port = partial(_setting, metavar="PORT")
_size = partial(_setting, metavar="SIZE")


@click.command()
@_file("--config", help="TOML file with these settings, called as they are here, '_' for '-'.")
@_setting("--stream", metavar="NAME", help="The stream whose cluster this is.")
@_setting("--name", metavar="NAME", help="This member; the name in its certificate.")
@_setting("--directory", metavar="DIR", help="Where it keeps everything; made if missing.")
@_setting(
    "--member",
    "members",
    multiple=True,
    metavar=MEMBER_FORM.replace(" ", "-"),
    help="A member of the cluster, this one too; 1, 3, 5 or 7 of them, the same on all nodes. "
    "RT_MEMBERS has ';' between them, the file a table each: [members.n1] with raft and data.",
)
@_file("--ca", help="PEM file of the CA that all certificates of the stream chain to.")
@_file("--cert", help="PEM file of the node's certificate.")
@_file("--key", help="PEM file of its private key.")
@_setting("--bootstrap/--no-bootstrap", default=None, help="Make a new cluster if every member is blank.")
@_setting("--listen", metavar="IP", help="Address to listen at, for all ports; all addresses if not given.")
@_port("--data-port", help=f"gRPC; that of its own member address if not given ({DATA_PORT} by custom).")
@_port("--raft-port", help=f"Raft; that of its own member address if not given ({RAFT_PORT} by custom).")
@_port("--rest-port", help=f"REST; 0 for none, {REST_PORT} if not given.")
@_port("--health-port", help=f"Health and metrics; 0 for none, {HEALTH_PORT} if not given.")
@_setting("--log-level", metavar="|".join(LOG_LEVELS), help="What is logged to stderr; info if not given.")
@_setting("--log-format", metavar="|".join(LOG_FORMATS), help="How: key=value or JSON; text if not given.")
@_size("--roll-bytes", help="A merged file of so much is followed by the next; 1Gi by custom.")
@_setting("--roll-minutes", metavar="N", help="So is one so old; 0 for never, as by custom.")
@_setting(
    "--archive-time-minutes",
    metavar="N",
    help="Merged files are trimmed so long after their last message; 0 for never, 10080 by custom.",
)
@_size("--archive-limit", help="So are the oldest while all have more than, say, 90Gi; 0 for no limit.")
@_setting(
    "--archive-disk-percent",
    metavar="N",
    help="And while the disks of a majority of nodes are fuller than this; 0 for never, 90 by custom.",
)
@_size("--archive-hold-limit", help="Most that is kept for named subscribers alone; 10Gi by custom.")
@click.pass_context
def node(ctx: click.Context, /, **flags: Any) -> None:
    """Run a node: consensus, the copies of sessions, the merged log.

    Flags beat RT_<SETTING> (RT_NODE_<SETTING> first), which beats the file, which beats defaults. Settings of
    rolling and archiving are the cluster's: they hold once a node that says them leads, and stay until
    another one, or an operator, says otherwise.

    The node runs until SIGTERM or SIGINT and then ends with 0. It ends with 1 if it cannot start or go on, 2
    for wrong settings, 71 if its data differs from that of the others.
    """
    try:
        config = node_config(_given(ctx, flags), os.environ, os.getcwd())
    except BadSetting as error:
        raise click.UsageError(str(error), ctx) from error
    node_logs.configure("node", config.log_level, config.log_format)
    check_certificate(config)
    lock = lock_directory(config)
    try:
        ctx.exit(supervise(config))
    finally:
        lock.close()


def _given(ctx: click.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that stand on the command line; those for logs also where they stand before `node`."""
    given = {key: value for key, value in flags.items() if value is not None and value != ()}
    before = ctx.parent
    for key in ("log_level", "log_format"):
        if before is not None and before.get_parameter_source(key) is ParameterSource.COMMANDLINE:
            given.setdefault(key, before.params[key])
    return given


def check_certificate(config: NodeConfig) -> None:
    """`rt.CertificateError` unless the TLS files are good and name this very node."""
    identity = TLS(config.ca, config.cert, config.key).identity
    wanted = f"rt://{config.stream}/node/{config.name}"
    if identity.uri != wanted:
        raise CertificateError(
            "the certificate is not this node's",
            where=config.cert,
            got=identity.uri,
            wanted=wanted,
            hint="Change stream, name or cert; `rt certs issue --role node` makes one.",
        )
