"""Keep a stream's certificates in Secrets of the Kubernetes namespace that this process runs in.

Which certificates are renewed is decided by pure functions. The request is a JSON file:

    {"stream": "trades", "ca": "rt-ca", "days": 398, "renew_days": 133, "certificates": [
        {"secret": "rt-tls-0", "role": "node", "name": "rt-0", "dedup": [], "lease": [],
         "dns": ["rt"], "ips": ["::1"]}]}

`ca` and each `secret` are names of Secrets.

Invariants:
- Only existing Secrets are filled; none is created. So the rights to get and patch these Secrets are enough.
- A change fails if the Secret was changed meanwhile.
- The CA is created once, for a Secret without one. Nothing is issued before the Secret holds the CA.
- Keys are written only to a directory that other users cannot read, and never to a log.
- A certificate with the requested names, of the current CA and with time left, is never replaced.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import json
import logging
import os
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, NamedTuple

from cryptography import x509
from msgspec import Struct

from rt.errors import CertificateError, InvalidName, RtError
from rt.net.cert_files import check
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity

SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes puts a pod's token, the CA of its API, and the namespace."""
TIMEOUT_S: Final = 30.0

logger = logging.getLogger("rt.net")


class ApiRejected(RtError):
    """The Kubernetes API is not reachable or rejected a request."""

    grpc_status = "UNAVAILABLE"
    retriable = True


class Secret(NamedTuple):
    """The data of a Secret, and its version."""

    data: Mapping[str, bytes]
    version: str


class ClusterApi:
    """The Secrets of a namespace. All methods raise `rt.net.k8s_certs.ApiRejected`."""

    def __init__(self, host: str, port: int, *, account: Path = Path(SERVICE_ACCOUNT)) -> None:
        try:
            self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
            namespace = (account / "namespace").read_text().strip()
            self._token = (account / "token").read_text().strip()
        except OSError as error:
            raise ApiRejected(
                "this process has no service account",
                where=account,
                got=error.strerror,
                hint="Run it in a pod, as the chart's job does.",
            ) from error
        host = f"[{host}]" if ":" in host else host
        self._base = f"https://{host}:{port}/api/v1/namespaces/{namespace}/secrets/"

    def get(self, name: str) -> Secret:
        fields = self._ask("GET", name)
        try:
            data = {
                key: base64.b64decode(value, validate=True)
                for key, value in (fields.get("data") or {}).items()
            }
            return Secret(data, fields["metadata"]["resourceVersion"])
        except (KeyError, TypeError, binascii.Error) as error:
            raise ApiRejected("the answer is no Secret", where=f"Secret {name}", got=repr(error)) from error

    def fill(self, name: str, data: Mapping[str, bytes], *, version: str) -> None:
        """Set these keys. Fails if the Secret has another version now."""
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
                fields = json.load(answer)
        except urllib.error.HTTPError as error:
            error.close()
            raise ApiRejected(
                f"the Kubernetes API refuses to {method.lower()} a Secret",
                where=f"Secret {name}",
                got=f"{error.code} {error.reason}",
                hint=_HINTS.get(error.code),
            ) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            where = f"{method} {self._base}{name}"
            raise ApiRejected("cannot reach the Kubernetes API", where=where, got=str(error)) from error
        if not isinstance(fields, dict):
            raise ApiRejected("the answer is no Secret", where=f"Secret {name}")
        return fields


_HINTS: Final = {
    403: "The Role of the service account must name this Secret, with get and patch.",
    404: "The chart creates it without data: install or upgrade the chart.",
    409: "It was changed at the same time: run the command again.",
}


def api_of(environment: Mapping[str, str], *, account: Path = Path(SERVICE_ACCOUNT)) -> ClusterApi:
    """The API of the cluster that this pod runs in."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not port.isdecimal():
        raise ApiRejected(
            "this process does not run in a pod of Kubernetes",
            where="KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT",
            got=f"{host}, {port}",
        )
    return ClusterApi(host, int(port), account=account)


def keep(order: CertificateRequest, api: ClusterApi, *, now: datetime | None = None) -> list[str]:
    """Fill every Secret of the request; returns those that were changed.

    Raises `rt.CertificateError` if the CA's Secret holds no valid CA. Changes made before an error stay.
    """
    now = now or datetime.now(UTC)
    changed = []
    with tempfile.TemporaryDirectory(prefix="rt-certs-") as directory:
        if _have_ca(order.ca, api, Path(directory), now):
            changed.append(order.ca)
        ca = Path(directory, "ca.crt").read_bytes()
        for requested in order.certificates:
            secret = api.get(requested.secret)
            why = why_renew(secret.data, requested, ca=ca, renew_days=order.renew_days, now=now)
            if why is not None:
                pair = _issued(requested, Path(directory), days=order.days, now=now)
                api.fill(requested.secret, pair, version=secret.version)
                logger.info("certificate_issued secret=%s why=%r", requested.secret, why)
                changed.append(requested.secret)
    return changed


def _have_ca(name: str, api: ClusterApi, directory: Path, now: datetime) -> bool:
    """Write the CA of the Secret into the directory. Returns whether it was created now."""
    secret = api.get(name)
    has = [key for key in ("tls.crt", "tls.key") if secret.data.get(key)]
    if len(has) == 1:
        raise CertificateError(
            "the CA's Secret holds half of a CA",
            where=f"Secret {name}",
            got=has[0],
            expected="tls.crt and tls.key",
            hint="Restore the missing one. Without both, a new CA is created, which no client trusts.",
        )
    if has:
        (directory / "ca.crt").write_bytes(secret.data["tls.crt"])
        with open(os.open(directory / "ca.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret.data["tls.key"])
        return False
    init_ca(directory, now=now)
    cert, key = (directory / "ca.crt").read_bytes(), (directory / "ca.key").read_bytes()
    api.fill(name, dict(zip(FILES, (cert, cert, key), strict=True)), version=secret.version)
    logger.info("ca_created secret=%s", name)
    return True


def _issued(requested: RequestedSecret, directory: Path, *, days: int, now: datetime) -> dict[str, bytes]:
    paths = issue(
        directory, requested.identity, dns=requested.dns, ips=requested.ips, days=days, renew=True, now=now
    )
    return {key: path.read_bytes() for key, path in zip(FILES, paths, strict=True)}


FILES: Final = ("ca.crt", "tls.crt", "tls.key")
"""The keys of a Secret: the CA's certificates, the pair."""
_KEYS: Final = {"stream": str, "ca": str, "days": int, "renew_days": int, "certificates": list}
_LISTS: Final = ("dedup", "lease", "dns", "ips")


class RequestedSecret(Struct, frozen=True):
    """One certificate, and the Secret that holds it."""

    secret: str
    identity: Identity
    dns: tuple[str, ...]
    ips: tuple[IPv4Address | IPv6Address, ...]

    @property
    def hosts(self) -> set[str | IPv4Address | IPv6Address]:
        """The host names of the certificate; a node's include its own name."""
        own = {self.identity.name} if self.identity.role == "node" else set()
        return {*own, *self.dns, *self.ips}


class CertificateRequest(Struct, frozen=True):
    ca: str
    """The Secret of the CA."""
    days: int
    renew_days: int
    """The number of days before its end at which a certificate is renewed; less than `days`."""
    certificates: tuple[RequestedSecret, ...]


def read_order(text: str, *, where: object) -> CertificateRequest:
    """Parse the file. Raises `rt.CertificateError` if it is invalid."""
    try:
        fields = _checked(json.loads(text), _KEYS)
        requested = tuple(_requested(fields["stream"], one) for one in fields["certificates"])
    except (ValueError, TypeError, KeyError, InvalidName) as error:
        raise CertificateError("invalid certificate request", where=where, got=str(error)[:300]) from error
    secrets = [fields["ca"], *(one.secret for one in requested)]
    if len(set(secrets)) < len(secrets):
        raise CertificateError("a Secret is listed twice", where=where, got=", ".join(sorted(secrets)))
    if not 0 <= fields["renew_days"] < fields["days"]:
        got = f"{fields['renew_days']} of {fields['days']} days"
        raise CertificateError("renew_days must be less than days", where=where, got=got)
    return CertificateRequest(fields["ca"], fields["days"], fields["renew_days"], requested)


def why_renew(
    has: Mapping[str, bytes], requested: RequestedSecret, *, ca: bytes, renew_days: int, now: datetime
) -> str | None:
    """Why a new certificate is needed for a Secret that holds `has`; None: keep it."""
    if not all(has.get(key) for key in FILES):
        return "there is none"
    if has["ca.crt"] != ca:
        return "the CA is another one"
    try:
        is_valid = check(has["ca.crt"], has["tls.crt"], has["tls.key"], now=now)
        leaf = x509.load_pem_x509_certificate(has["tls.crt"])
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (CertificateError, ValueError, x509.ExtensionNotFound):
        return "what is there is not valid"
    dns, ips = names.get_values_for_type(x509.DNSName), names.get_values_for_type(x509.IPAddress)
    if is_valid.identity != requested.identity or {*dns, *ips} != requested.hosts:
        return "it names something else"
    if is_valid.not_after - now < timedelta(days=renew_days):
        return f"it ends within {renew_days} days"
    return None


def _requested(stream: str, fields: Any) -> RequestedSecret:
    one = _checked(fields, {"secret": str, "role": str, "name": str, **dict.fromkeys(_LISTS, list)})
    for key in _LISTS:
        if not all(isinstance(each, str) for each in one[key]):
            raise TypeError(f"{key} holds something else than strings")
    identity = Identity(stream, one["role"], one["name"], frozenset(one["dedup"]), frozenset(one["lease"]))
    return RequestedSecret(one["secret"], identity, tuple(one["dns"]), tuple(map(ip_address, one["ips"])))


def _checked(fields: Any, keys: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(fields, dict) or set(fields) != set(keys):
        raise ValueError(f"expected an object of {', '.join(keys)}")
    for key, kind in keys.items():
        if not isinstance(fields[key], kind) or isinstance(fields[key], bool):
            raise TypeError(f"{key} is no {kind.__name__}")
    return fields
