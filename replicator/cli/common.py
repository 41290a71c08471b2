"""What `rt push` and `rt pull` share: what their options say of TLS, and how a signal ends them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Final

import click

from rt.net.tls import TLS

FILE: Final = click.Path(exists=True, dir_okay=False)
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


def tls_of(ca: str | None, cert: str | None, key: str | None, *, insecure: bool) -> TLS | None:
    """What the options say; misuse unless it is either all three files or `--insecure`."""
    if insecure:
        if ca or cert or key:
            raise click.UsageError("--insecure goes without --ca, --cert and --key.")
        return None
    if not (ca and cert and key):
        raise click.UsageError("Give --ca, --cert and --key (or --insecure, on this machine).")
    return TLS(ca=ca, cert=cert, key=key)


def on_signals(stop: Callable[[int], None]) -> None:
    """Have the running loop call `stop` with each signal that ends a command, unless it is ignored."""
    for number in _STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
