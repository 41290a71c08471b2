"""Keeps a stream's certificates in Secrets of the Kubernetes namespace that this process runs in.

The laws. Only Secrets that are there are filled in, none is made: the rights to read and to change these very
ones are all that it takes. A change is refused if somebody else changed the Secret meanwhile. The CA is made
once, for a Secret that holds nothing of one: before its Secret holds it, nothing is issued by it. Keys reach
a directory that nobody else can read, and no log.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from rt.errors import CertificateError, RtError
from rt.net.certs import init_ca, issue
from rt.net.wanted import FILES, Order, Wanted, why_anew

SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes puts a pod's token, the CA of its API, and the namespace."""
TIMEOUT_S: Final = 30.0

logger = logging.getLogger("rt.net")


class ApiRefused(RtError):
    """The API of Kubernetes cannot be asked, or says no."""

    grpc_status = "UNAVAILABLE"
    retriable = True


class Secret(NamedTuple):
    """What a Secret holds, and which version of it that is."""

    data: Mapping[str, bytes]
    version: str


class ClusterApi:
    """The Secrets of a namespace. `rt.net.cluster_secrets.ApiRefused` from all of it."""

    def __init__(self, host: str, port: int, *, account: Path = Path(SERVICE_ACCOUNT)) -> None:
        try:
            self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
            namespace = (account / "namespace").read_text().strip()
            self._token = (account / "token").read_text().strip()
        except OSError as error:
            raise ApiRefused(
                "this process has no service account",
                where=account,
                got=error.strerror,
                hint="It is run by the chart's job, in a pod.",
            ) from error
        host = f"[{host}]" if ":" in host else host
        self._base = f"https://{host}:{port}/api/v1/namespaces/{namespace}/secrets/"

    def get(self, name: str) -> Secret:
        """What the Secret holds now."""
        said = self._ask("GET", name)
        try:
            data = {
                key: base64.b64decode(value, validate=True) for key, value in (said.get("data") or {}).items()
            }
            return Secret(data, said["metadata"]["resourceVersion"])
        except (KeyError, TypeError, binascii.Error) as error:
            raise ApiRefused("the answer is no Secret", where=f"Secret {name}", got=repr(error)) from error

    def fill(self, name: str, data: Mapping[str, bytes], *, version: str) -> None:
        """Set these keys, unless the Secret is of another version by now."""
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        self._ask("PATCH", name, {"metadata": {"resourceVersion": version}, "data": encoded})

    def _ask(self, method: str, name: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310 - always https
            self._base + name,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._token}",
                "Accept": "application/json",
                "Content-Type": "application/merge-patch+json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._context) as answer:  # noqa: S310
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            error.close()
            raise ApiRefused(
                f"the API of Kubernetes refuses to {method.lower()} a Secret",
                where=f"Secret {name}",
                got=f"{error.code} {error.reason}",
                hint=_HINTS.get(error.code),
            ) from None
        except (OSError, ValueError) as error:
            where = f"{method} {self._base}{name}"
            raise ApiRefused("the API of Kubernetes cannot be asked", where=where, got=str(error)) from error
        if not isinstance(said, dict):
            raise ApiRefused("the answer is no Secret", where=f"Secret {name}")
        return said


_HINTS: Final = {
    403: "The Role of the service account must name this Secret, with get and patch.",
    404: "The chart makes it, without data: install it again, or upgrade.",
    409: "Somebody else changed it at the same time: run it again.",
}


def api_of(environment: Mapping[str, str], *, account: Path = Path(SERVICE_ACCOUNT)) -> ClusterApi:
    """The API of the cluster that this pod runs in."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not port.isdecimal():
        raise ApiRefused(
            "this process does not run in a pod of Kubernetes",
            where="KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT",
            got=f"{host}, {port}",
        )
    return ClusterApi(host, int(port), account=account)


def keep(order: Order, api: ClusterApi, *, now: datetime | None = None) -> list[str]:
    """Have every Secret of the order hold what it wants; those that were changed.

    `rt.CertificateError` if the CA's Secret holds no valid CA. What was done before an error stays done.
    """
    now = now or datetime.now(UTC)
    changed = []
    with tempfile.TemporaryDirectory(prefix="rt-certs-") as directory:
        if _have_ca(order.ca, api, Path(directory), now):
            changed.append(order.ca)
        ca = Path(directory, "ca.crt").read_bytes()
        for wanted in order.certificates:
            secret = api.get(wanted.secret)
            why = why_anew(secret.data, wanted, ca=ca, renew_days=order.renew_days, now=now)
            if why is not None:
                pair = _issued(wanted, Path(directory), days=order.days, now=now)
                api.fill(wanted.secret, pair, version=secret.version)
                logger.info("certificate_issued secret=%s why=%r", wanted.secret, why)
                changed.append(wanted.secret)
    return changed


def _have_ca(name: str, api: ClusterApi, directory: Path, now: datetime) -> bool:
    """Put the CA of the Secret into the directory; whether it was made only now."""
    secret = api.get(name)
    has = [key for key in ("tls.crt", "tls.key") if secret.data.get(key)]
    if len(has) == 1:
        raise CertificateError(
            "the CA's Secret holds half of a CA",
            where=f"Secret {name}",
            got=has[0],
            wanted="tls.crt and tls.key",
            hint="Put the other one back. Without both another CA is made, which no client knows.",
        )
    if has:
        (directory / "ca.crt").write_bytes(secret.data["tls.crt"])
        with open(os.open(directory / "ca.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret.data["tls.key"])
        return False
    init_ca(directory, now=now)
    cert, key = (directory / "ca.crt").read_bytes(), (directory / "ca.key").read_bytes()
    api.fill(name, dict(zip(FILES, (cert, cert, key), strict=True)), version=secret.version)
    logger.info("ca_made secret=%s", name)
    return True


def _issued(wanted: Wanted, directory: Path, *, days: int, now: datetime) -> dict[str, bytes]:
    paths = issue(directory, wanted.identity, dns=wanted.dns, ips=wanted.ips, days=days, renew=True, now=now)
    return {key: path.read_bytes() for key, path in zip(FILES, paths, strict=True)}
