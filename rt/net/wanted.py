"""Which certificates a stream on Kubernetes is to have, and which of those that it has are to be made anew.

Pure. The law: a certificate that names what is wanted, of the present CA and with time left, is never
replaced.

What is wanted is a file of JSON:

    {"stream": "trades", "ca": "rt-ca", "days": 398, "renew_days": 133, "certificates": [
        {"secret": "rt-tls-0", "role": "node", "name": "rt-0", "dedup": [], "lease": [],
         "dns": ["rt"], "ips": ["::1"]}]}

`ca` and each `secret` are names of Secrets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final

from cryptography import x509

from rt.errors import CertificateError, InvalidName
from rt.net.identity import Identity
from rt.net.material import check

FILES: Final = ("ca.crt", "tls.crt", "tls.key")
"""The keys of a Secret: the CA's certificates, the pair."""
_KEYS: Final = {"stream": str, "ca": str, "days": int, "renew_days": int, "certificates": list}
_LISTS: Final = ("dedup", "lease", "dns", "ips")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One certificate, and the Secret that it is kept in."""

    secret: str
    identity: Identity
    dns: tuple[str, ...]
    ips: tuple[IPv4Address | IPv6Address, ...]

    @property
    def hosts(self) -> set[str | IPv4Address | IPv6Address]:
        """What it names beside its identity: of a node also its own name."""
        own = {self.identity.name} if self.identity.role == "node" else set()
        return {*own, *self.dns, *self.ips}


@dataclass(frozen=True, slots=True)
class Order:
    """All that is wanted."""

    ca: str
    """The Secret of the CA."""
    days: int
    """How long certificates are valid, ..."""
    renew_days: int
    """... and how long before their end they are made anew; fewer than `days`."""
    certificates: tuple[Wanted, ...]


def read_order(text: str, *, where: object) -> Order:
    """What the file says; `rt.CertificateError` if it says nothing that can be."""
    try:
        said = _checked(json.loads(text), _KEYS)
        wanted = tuple(_wanted(said["stream"], one) for one in said["certificates"])
    except (ValueError, TypeError, KeyError, InvalidName) as error:
        raise CertificateError("no order for certificates", where=where, got=str(error)[:300]) from error
    secrets = [said["ca"], *(one.secret for one in wanted)]
    if len(set(secrets)) < len(secrets):
        raise CertificateError("a Secret is wanted twice", where=where, got=", ".join(sorted(secrets)))
    if not 0 <= said["renew_days"] < said["days"]:
        got = f"{said['renew_days']} of {said['days']} days"
        raise CertificateError("certificates would be renewed at once, for ever", where=where, got=got)
    return Order(said["ca"], said["days"], said["renew_days"], wanted)


def why_anew(
    has: Mapping[str, bytes], wanted: Wanted, *, ca: bytes, renew_days: int, now: datetime
) -> str | None:
    """Why a certificate is to be made for a Secret that holds `has`; None: keep what is there."""
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
    if is_valid.identity != wanted.identity or {*dns, *ips} != wanted.hosts:
        return "it names something else"
    if is_valid.not_after - now < timedelta(days=renew_days):
        return f"it ends within {renew_days} days"
    return None


def _wanted(stream: str, said: Any) -> Wanted:
    one = _checked(said, {"secret": str, "role": str, "name": str, **dict.fromkeys(_LISTS, list)})
    for key in _LISTS:
        if not all(isinstance(each, str) for each in one[key]):
            raise TypeError(f"{key} holds something else than strings")
    identity = Identity(stream, one["role"], one["name"], frozenset(one["dedup"]), frozenset(one["lease"]))
    return Wanted(one["secret"], identity, tuple(one["dns"]), tuple(map(ip_address, one["ips"])))


def _checked(said: Any, keys: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(said, dict) or set(said) != set(keys):
        raise ValueError(f"wanted an object of {', '.join(keys)}")
    for key, kind in keys.items():
        if not isinstance(said[key], kind) or isinstance(said[key], bool):
            raise TypeError(f"{key} is no {kind.__name__}")
    return said
