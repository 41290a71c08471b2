"""The identity that a certificate names in its URI SANs.

A certificate has exactly one identity, the URI SAN `rt://<stream>/<role>/<name>`. More SANs grant rights:
`rt://<stream>/dedup/<id>` lets a publisher use that dedup id, and `<id>~<suffix>`;
`rt://<stream>/lease/<group>` lets a publisher or subscriber hold leases of that group.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal, TypeAlias, cast, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from msgspec import Struct

from rt.errors import CertificateError, InvalidName, RtError
from rt.names import check_name

Role: TypeAlias = Literal["node", "publisher", "subscriber", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
LEASE_ROLES: tuple[Role, ...] = ("publisher", "subscriber")
_GRANTS = {"dedup": "dedup id", "lease": "group of leases"}
"""Words in place of the role in URIs that grant rights."""

_URI = re.compile(r"rt://([^/]*)/([^/]*)/([^/]*)")
STREAM_HINT: Final = "Correct `stream`, the endpoints or the certificate. `rt certs show` names its stream."
"""The hint if a certificate, a client and a node do not belong to the same stream."""
UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    InvalidSignature,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.UnsupportedGeneralNameType,
)
"""Errors that `cryptography` raises for bytes that are no usable certificate or key."""


class Identity(Struct, frozen=True):
    """The owner that a certificate names. Raises `rt.InvalidName` or `rt.CertificateError` if invalid."""

    stream: str
    role: Role
    name: str
    dedup_ids: frozenset[str] = frozenset()
    """Dedup ids that the owner may use, with a suffix or without; publishers only."""
    lease_groups: frozenset[str] = frozenset()
    """Groups whose leases the owner may hold and list; publishers and subscribers only."""

    def __post_init__(self) -> None:
        check_name(self.stream, kind="stream")
        check_name(self.name, kind="certificate")
        for dedup_id in self.dedup_ids:
            check_name(dedup_id, kind="dedup id")
        for group in self.lease_groups:
            check_name(group, kind="group of leases")
        if self.role not in ROLES:
            raise CertificateError("unknown role", got=repr(self.role)[:200], expected=" or ".join(ROLES))
        if self.dedup_ids and self.role != "publisher":
            raise CertificateError("only a publisher's certificate may have dedup ids", got=self.role)
        if self.lease_groups and self.role not in LEASE_ROLES:
            raise CertificateError(
                "a certificate of that role may not have groups of leases",
                got=self.role,
                expected=" or ".join(LEASE_ROLES),
            )

    @property
    def uri(self) -> str:
        return f"rt://{self.stream}/{self.role}/{self.name}"

    @property
    def uris(self) -> list[str]:
        """All its URI SANs, as `identity_from_uris` reads them."""
        return [
            self.uri,
            *(f"rt://{self.stream}/dedup/{dedup_id}" for dedup_id in sorted(self.dedup_ids)),
            *(f"rt://{self.stream}/lease/{group}" for group in sorted(self.lease_groups)),
        ]


def identity_from_uris(uris: Iterable[str], *, where: object = None) -> Identity:
    """The identity in a certificate's URI SANs. Raises `rt.CertificateError` unless there is exactly one.

    Ignores URIs of other schemes. Pass URI SANs only (gRPC: `peer_uri`, its bytes decoded with
    errors="replace"): a DNS SAN in the list could pose as a URI.
    """
    ours = [_split_uri(uri, where) for uri in uris if uri[:3].lower() == "rt:"]
    owners = [parts for parts in ours if parts[1] not in _GRANTS]
    if len(owners) != 1:
        raise CertificateError(
            "the certificate must name one identity",
            where=where,
            got=f"{len(owners)} URI SANs of that kind",
            expected=f"one rt://<stream>/<role>/<name>, role {' or '.join(ROLES)}",
            hint="`rt certs show` prints what a certificate names, `rt certs issue` makes one.",
        )
    stream, role, name = owners[0]
    granted: dict[str, set[str]] = {kind: set() for kind in _GRANTS}
    for other, kind, value in ours:
        if kind not in _GRANTS:
            continue
        if other != stream:
            got, expected = repr(other)[:200], repr(stream)[:200]
            what = f"a {_GRANTS[kind]} of another stream"
            raise CertificateError(what, where=where, got=got, expected=expected)
        granted[kind].add(value)
    try:
        dedup_ids, lease_groups = frozenset(granted["dedup"]), frozenset(granted["lease"])
        return Identity(stream, cast("Role", role), name, dedup_ids, lease_groups)
    except (InvalidName, CertificateError) as error:
        what = f"the certificate's identity is not valid: {error.what}"
        raise CertificateError(
            what, where=where, got=error.got, expected=error.expected, hint=error.hint
        ) from error


def identity_of(certificate: x509.Certificate, *, where: object = None) -> Identity:
    """The identity in a certificate. Raises `rt.CertificateError` unless there is exactly one."""
    with reading(where, "the certificate's alternative names are malformed"):
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            names = x509.SubjectAlternativeName([])
        return identity_from_uris(names.get_values_for_type(x509.UniformResourceIdentifier), where=where)


def peer_of(content: bytes, *, where: object) -> tuple[Identity, float]:
    """The identity of a peer that sent this certificate, and when it expires, seconds since 1970.

    The handshake has checked the certificate. Raises `rt.CertificateError` like `identity_of`.
    """
    with reading(where, "the certificate is malformed"):
        certificate = x509.load_der_x509_certificate(content)
        return identity_of(certificate, where=where), certificate.not_valid_after_utc.timestamp()


def _split_uri(uri: str, where: object) -> tuple[str, str, str]:
    if match := _URI.fullmatch(uri):
        return cast("tuple[str, str, str]", match.groups())
    raise CertificateError(
        "not an rt identity", where=where, got=repr(uri)[:200], expected="rt://<stream>/<role>/<name>"
    )


@contextlib.contextmanager
def reading(where: object, what: str, *, expected: str | None = None) -> Iterator[None]:
    """Convert errors of `cryptography` about bad input to `rt.CertificateError`.

    Their text is left out and not chained: it may quote a file that contains a key.
    """
    try:
        yield
    except RtError:
        raise
    except UNREADABLE:
        raise CertificateError(what, where=where, expected=expected) from None
