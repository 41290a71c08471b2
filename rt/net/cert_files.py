"""Read certificates, CAs and keys from files, and check that they belong together and are valid.

Key bytes never appear in an error, a log or a repr.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field  # noqa: TID251
from datetime import datetime
from typing import Literal, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from rt.errors import CertificateError
from rt.net.identity import UNREADABLE, Identity, identity_of, reading

StrPath: TypeAlias = str | os.PathLike[str]
State: TypeAlias = Literal["valid", "expired", "not yet valid"]

FILE_BYTES_MAX = 2**20
"""Far above any chain or CA bundle. Protects memory from a wrong path (a log, a disk)."""


@dataclass(frozen=True, slots=True)
class CertFiles:
    """One consistent, checked read of the three files, as PEM."""

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    identity: Identity
    not_after: datetime
    """The last moment at which the certificate is valid, UTC."""
    fingerprint: str
    """SHA-256 of the certificate's DER, in hex. May be logged."""


def check(
    ca: bytes, cert: bytes, key: bytes, *, now: datetime, files: tuple[str, str, str] = ("ca", "cert", "key")
) -> CertFiles:
    """Check that three PEM texts belong together and are valid at `now` (aware). Pure.

    `files` are their names in `rt.CertificateError`. Every CA certificate in `ca` is trusted.
    """
    ca_file, cert_file, key_file = files
    anchors = certificates_in(ca, where=ca_file)
    leaf, *intermediates = certificates_in(cert, where=cert_file)
    private = private_key_in(key, where=key_file)
    with reading(cert_file, "the certificate is malformed, or of an unknown kind"):
        if private.public_key() != leaf.public_key():
            what = "the private key is not the certificate's"
            raise CertificateError(what, where=key_file, expected=f"the key that {cert_file} names")
        _check_time(leaf, now, where=cert_file)
        if not _reaches(leaf, 0, intermediates, anchors, now):
            raise CertificateError(
                "the certificate does not chain to a CA that is trusted and valid now",
                where=cert_file,
                got=f"issuer {leaf.issuer.rfc4514_string()!r:.200}",
                expected=f"one of the {len(anchors)} in {ca_file}",
                hint="Put intermediates after the certificate. While CAs rotate, the CA file holds both.",
            )
        identity = identity_of(leaf, where=cert_file)
        _check_usage(leaf, identity, where=cert_file)
        fingerprint = leaf.fingerprint(SHA256()).hex()
        return CertFiles(ca, cert, key, identity, leaf.not_valid_after_utc, fingerprint)


def state_of(certificate: x509.Certificate, now: datetime) -> State:
    if now < certificate.not_valid_before_utc:
        return "not yet valid"
    return "expired" if now > certificate.not_valid_after_utc else "valid"


def _check_time(leaf: x509.Certificate, now: datetime, *, where: str) -> None:
    if (state := state_of(leaf, now)) != "valid":
        renewal = "Renew it where the CA is: `rt certs renew DIR NAME`. Then replace both files."
        raise CertificateError(
            f"the certificate is {state}",
            where=where,
            got=f"{leaf.not_valid_before_utc:%FT%TZ} to {leaf.not_valid_after_utc:%FT%TZ}",
            expected=f"{now:%FT%TZ} within",
            hint=renewal if state == "expired" else "Is this machine's clock right?",
        )


def _reaches(
    child: x509.Certificate,
    below: int,
    intermediates: list[x509.Certificate],
    anchors: list[x509.Certificate],
    now: datetime,
) -> bool:
    """Whether a path leads from `child`, with `below` CAs under its issuer, to an anchor."""
    if any(_issued(child, anchor, below, now) for anchor in anchors):
        return True
    issuers = [issuer for issuer in intermediates if _issued(child, issuer, below, now)]
    others = [other for other in intermediates if other not in issuers]
    return any(_reaches(issuer, below + 1, others, anchors, now) for issuer in issuers)


def _issued(child: x509.Certificate, issuer: x509.Certificate, below: int, now: datetime) -> bool:
    try:
        child.verify_directly_issued_by(issuer)
        constraints = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value
        if not constraints.ca or (constraints.path_length is not None and constraints.path_length < below):
            return False
        with contextlib.suppress(x509.ExtensionNotFound):
            if not issuer.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign:
                return False
        return state_of(issuer, now) == "valid"
    except UNREADABLE:
        return False


def _check_usage(leaf: x509.Certificate, identity: Identity, *, where: str) -> None:
    """Report a wrong usage locally, because a peer would only answer with a TLS alert."""
    try:
        usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    required = {"clientAuth": ExtendedKeyUsageOID.CLIENT_AUTH}
    if identity.role == "node":
        required["serverAuth"] = ExtendedKeyUsageOID.SERVER_AUTH
    if missing := [name for name, oid in required.items() if oid not in usages]:
        raise CertificateError(
            f"the certificate's extended key usage does not suit a {identity.role}",
            where=where,
            got=f"none of {' and '.join(missing)}",
            expected=" and ".join(required),
        )


def certificates_in(pem: bytes, *, where: object) -> list[x509.Certificate]:
    """The certificates in a PEM file, at least one. Raises `rt.CertificateError` with `where`."""
    with reading(where, "no certificate in the file", expected="-----BEGIN CERTIFICATE-----, in PEM"):
        return x509.load_pem_x509_certificates(pem)


def private_key_in(pem: bytes, *, where: object) -> PrivateKeyTypes:
    """The private key, without passphrase, in a PEM file. Raises `rt.CertificateError` with `where`."""
    with reading(where, "no private key in the file", expected="a key in PEM without a passphrase"):
        return load_pem_private_key(pem, password=None)


def read_file(path: StrPath, *, hint: str | None = None, flags: int = 0) -> bytes:
    """Read a regular file. Raises `rt.CertificateError` if unreadable or above `FILE_BYTES_MAX`.

    `hint`: what to do if there is no such file.
    """
    where = os.fspath(path)
    try:
        # O_NONBLOCK, so that a FIFO at the path cannot block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CertificateError("not a regular file", where=where)
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        hint = hint if isinstance(error, FileNotFoundError) else None
        raise CertificateError("cannot read the file", where=where, got=error.strerror, hint=hint) from error
    if len(content) > FILE_BYTES_MAX:
        raise CertificateError(
            "the file is too large", where=where, expected=f"at most {FILE_BYTES_MAX} bytes"
        )
    return content
