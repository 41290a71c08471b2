"""The error if no node of a stream can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rt.errors import CertificateError, RtError
from rt.net.connect_probe import why_unreachable
from rt.net.grpc_errors import Unreachable
from rt.net.tls import TLS


async def no_answer(
    endpoints: Sequence[str],
    stream: str,
    tls: TLS,
    failures: Mapping[str, RtError],
    *,
    within_seconds: float,
    probe_seconds: float,
) -> RtError:
    """The error, with the reason of each node: what a probe finds in time, else its error in `failures`.

    `within_seconds` is how long an answer was waited for, `probe_seconds` how long the reason is searched.
    """
    probes = (why_unreachable(endpoint, tls, timeout_s=probe_seconds) for endpoint in endpoints)
    probed = dict(zip(endpoints, await asyncio.gather(*probes), strict=True))
    reasons = {endpoint: why or failures.get(endpoint) for endpoint, why in probed.items()}
    known = [why for why in reasons.values() if why is not None]
    hints = [why.hint for why in known if why.hint]
    is_refused = all(isinstance(why, CertificateError) for why in reasons.values())
    return (CertificateError if is_refused else Unreachable)(
        f"no node of stream {stream} answers",
        got="; ".join(f"{endpoint}: {_told(why)}" for endpoint, why in reasons.items()),
        expected=f"an answer within {within_seconds:g} s",
        hint=hints[0] if hints else "Check the endpoints and the network.",
    )


def _told(why: RtError | None) -> str:
    if why is None:
        return "connected, but no answer"
    return why.what if why.got is None else f"{why.what} ({why.got})"
