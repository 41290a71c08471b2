"""Whose a certificate is, and TLS material read from files that may be replaced at any moment.

Identity is the URI SAN `rt://<stream>/<role>/<name>`, exactly one a certificate; `rt://<stream>/dedup/<id>`
beside it lets a publisher use that dedup id. The law: what `TLS.load` returns belongs together (key to
certificate, certificate to CA, at this moment), and no rotation turns one identity into another. Bytes of a
key never reach an error, a log or a repr.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import ssl
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, TypeAlias, cast, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from rt.errors import CertificateError, InvalidName, RtError
from rt.names import check_name

StrPath: TypeAlias = str | os.PathLike[str]
Role: TypeAlias = Literal["node", "publisher", "subscriber", "operator"]
State: TypeAlias = Literal["valid", "expired", "not yet valid"]

ROLES: tuple[Role, ...] = get_args(Role)
FILE_BYTES_MAX = 2**20  # far above any chain or CA bundle; keeps a wrong path (a log, a disk) out of memory

# Pauses between reads of files that do not belong together: a rotation needs a few microseconds between its
# renames, or as long as a loaded machine takes to give the writer a processor again.
_PAUSES_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
_URI = re.compile(r"rt://([^/]*)/([^/]*)/([^/]*)")
_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    InvalidSignature,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.UnsupportedGeneralNameType,
)
_log = logging.getLogger("rt.net")


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a certificate names. `rt.InvalidName` or `rt.CertificateError` if it would name no one."""

    stream: str
    role: Role
    name: str
    dedup_ids: frozenset[str] = frozenset()
    """Dedup ids the holder may use; publishers only."""

    def __post_init__(self) -> None:
        check_name(self.stream, kind="stream")
        check_name(self.name, kind="certificate")
        for dedup_id in self.dedup_ids:
            check_name(dedup_id, kind="dedup id")
        if self.role not in ROLES:
            raise CertificateError("no such role", got=repr(self.role)[:200], wanted=" or ".join(ROLES))
        if self.dedup_ids and self.role != "publisher":
            raise CertificateError("only a publisher's certificate carries dedup ids", got=self.role)

    @property
    def uri(self) -> str:
        """The URI SAN that says it."""
        return f"rt://{self.stream}/{self.role}/{self.name}"

    @property
    def uris(self) -> list[str]:
        """All its URI SANs: `identity_from_uris` takes them back."""
        return [self.uri, *(f"rt://{self.stream}/dedup/{dedup_id}" for dedup_id in sorted(self.dedup_ids))]


def identity_from_uris(uris: Iterable[str], *, where: object = None) -> Identity:
    """The identity in a certificate's URI SANs; `rt.CertificateError` unless there is exactly one.

    URIs of other schemes say nothing here and are passed over. Give it URI SANs only (gRPC: `peer_uri`, its
    bytes decoded with errors="replace"): in a list mixed with DNS SANs a DNS name could pose as a URI.
    """
    ours = [_split_uri(uri, where) for uri in uris if uri[:3].lower() == "rt:"]
    owners = [parts for parts in ours if parts[1] != "dedup"]
    if len(owners) != 1:
        raise CertificateError(
            "the certificate must name one identity",
            where=where,
            got=f"{len(owners)} URI SANs of that kind",
            wanted=f"one rt://<stream>/<role>/<name>, role {' or '.join(ROLES)}",
            hint="`rt certs show` prints what a certificate names, `rt certs issue` makes one.",
        )
    stream, role, name = owners[0]
    dedups = [parts for parts in ours if parts[1] == "dedup"]
    if strangers := [other for other, _, _ in dedups if other != stream]:
        got, wanted = repr(strangers[0])[:200], repr(stream)[:200]
        raise CertificateError("a dedup id of another stream", where=where, got=got, wanted=wanted)
    try:
        return Identity(stream, cast("Role", role), name, frozenset(dedup_id for _, _, dedup_id in dedups))
    except (InvalidName, CertificateError) as error:
        what = f"the certificate's identity is not valid: {error.what}"
        raise CertificateError(
            what, where=where, got=error.got, wanted=error.wanted, hint=error.hint
        ) from error


def identity_of(certificate: x509.Certificate, *, where: object = None) -> Identity:
    """The identity a certificate names, one's own or a peer's; `rt.CertificateError` if not exactly one."""
    with reading(where, "the certificate's alternative names are malformed"):
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            names = x509.SubjectAlternativeName([])
        return identity_from_uris(names.get_values_for_type(x509.UniformResourceIdentifier), where=where)


def _split_uri(uri: str, where: object) -> tuple[str, str, str]:
    if match := _URI.fullmatch(uri):
        return cast("tuple[str, str, str]", match.groups())
    raise CertificateError(
        "not an rt identity", where=where, got=repr(uri)[:200], wanted="rt://<stream>/<role>/<name>"
    )


@dataclass(frozen=True, slots=True)
class Credentials:
    """One consistent, checked read of the three files, as PEM."""

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    identity: Identity
    not_after: datetime
    """The last moment at which the certificate is valid, UTC."""
    fingerprint: str
    """SHA-256 of the certificate's DER, hexadecimal: fit for logs."""


@dataclass(frozen=True, slots=True)
class TLS:
    """Paths of PEM files: the CA or CAs that peers must chain to, our certificate, its private key.

    The certificate may be followed by its intermediates; the key has no passphrase. Making one reads and
    checks the files: `rt.CertificateError` says what is wrong with which. Later contents are seen by `load`.
    """

    ca: StrPath
    cert: StrPath
    key: StrPath
    identity: Identity = field(init=False, compare=False)
    """As the files said when this was made. A rotation may change its dedup ids, nothing else."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", self._load().identity)

    def load(self) -> Credentials:
        """Read the files as they are now, checked and belonging together.

        Files that do not pass may be in the middle of a rotation: they are read again, for 0.13 s at most,
        before `rt.CertificateError`. A caller that holds older credentials keeps them then.
        """
        loaded = self._load()
        if loaded.identity.uri != self.identity.uri:
            raise CertificateError(
                "the certificate was replaced by one of another identity",
                where=os.fspath(self.cert),
                got=loaded.identity.uri,
                wanted=self.identity.uri,
                hint="Restart the process to give it another identity.",
            )
        return loaded

    def changed(self, since: Credentials) -> bool:
        """Whether `load` would give something else than `since`: the contents differ, or cannot be read."""
        try:
            return self._read() != (since.ca, since.cert, since.key)
        except CertificateError:
            return True

    def ssl_server_context(self) -> ssl.SSLContext:
        """A context for `load`'s credentials: TLS 1.3, peers show a certificate of our CA."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # a resumed session would outlive the check of its certificate
        return context

    def ssl_client_context(self) -> ssl.SSLContext:
        """A context for `load`'s credentials: TLS 1.3, the peer's SANs hold the host that was dialled."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _load(self) -> Credentials:
        for pause_s in _PAUSES_S:
            with contextlib.suppress(CertificateError):
                return self._load_once()
            time.sleep(pause_s)
        return self._load_once()

    def _load_once(self) -> Credentials:
        files = os.fspath(self.ca), os.fspath(self.cert), os.fspath(self.key)
        credentials = check(*self._read(), now=datetime.now(UTC), files=files)
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.stat(self.key).st_mode)
            if mode & stat.S_IROTH:
                _log.warning("key_readable_by_others path=%r mode=%04o", files[2], mode)
        return credentials

    def _read(self) -> tuple[bytes, bytes, bytes]:
        return read_file(self.ca), read_file(self.cert), read_file(self.key)

    def _context(self, protocol: int) -> ssl.SSLContext:
        credentials = self.load()
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # As in `check`, and as gRPC does: whatever stands in the CA file is trusted, a root or not.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            with _memory_file(credentials.cert) as cert, _memory_file(credentials.key) as key:
                context.load_cert_chain(cert, key)
            # Comments in a CA bundle may be UTF-8, which this call refuses.
            context.load_verify_locations(cadata=credentials.ca.decode("ascii", "ignore"))
        except ssl.SSLError as error:
            raise CertificateError(
                "OpenSSL refuses the certificate", where=os.fspath(self.cert), got=error.reason
            ) from error
        return context


def check(
    ca: bytes,
    cert: bytes,
    key: bytes,
    *,
    now: datetime,
    files: tuple[str, str, str] = ("ca", "cert", "key"),
) -> Credentials:
    """Check that three PEM texts belong together and are good at `now` (aware); pure.

    `files` are what `rt.CertificateError` calls them. Trusted is each certificate in `ca` that is a CA.
    """
    ca_file, cert_file, key_file = files
    anchors = certificates_in(ca, where=ca_file)
    leaf, *intermediates = certificates_in(cert, where=cert_file)
    private = private_key_in(key, where=key_file)
    with reading(cert_file, "the certificate is malformed, or of an unknown kind"):
        if private.public_key() != leaf.public_key():
            what = "the private key is not the certificate's"
            raise CertificateError(what, where=key_file, wanted=f"the key that {cert_file} names")
        _check_time(leaf, now, where=cert_file)
        if not _reaches(leaf, 0, intermediates, anchors, now):
            raise CertificateError(
                "the certificate does not chain to a CA that is trusted and valid now",
                where=cert_file,
                got=f"issuer {leaf.issuer.rfc4514_string()!r:.200}",
                wanted=f"one of the {len(anchors)} in {ca_file}",
                hint="Intermediates follow the certificate; while CAs rotate, the CA file holds both.",
            )
        identity = identity_of(leaf, where=cert_file)
        _check_usage(leaf, identity, where=cert_file)
        fingerprint = leaf.fingerprint(SHA256()).hex()
        return Credentials(ca, cert, key, identity, leaf.not_valid_after_utc, fingerprint)


def state_of(certificate: x509.Certificate, now: datetime) -> State:
    """Whether the certificate is within its validity, both ends included."""
    if now < certificate.not_valid_before_utc:
        return "not yet valid"
    return "expired" if now > certificate.not_valid_after_utc else "valid"


def _check_time(leaf: x509.Certificate, now: datetime, *, where: str) -> None:
    if (state := state_of(leaf, now)) != "valid":
        late = state == "expired"
        raise CertificateError(
            f"the certificate is {state}",
            where=where,
            got=f"{leaf.not_valid_before_utc:%FT%TZ} to {leaf.not_valid_after_utc:%FT%TZ}",
            wanted=f"{now:%FT%TZ} within",
            hint="Renew it: `rt certs issue --renew`." if late else "Is this machine's clock right?",
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
    except _UNREADABLE:
        return False


def _check_usage(leaf: x509.Certificate, identity: Identity, *, where: str) -> None:
    """Find here what a peer would answer with a bare alert."""
    try:
        usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    wanted = {"clientAuth": ExtendedKeyUsageOID.CLIENT_AUTH}
    if identity.role == "node":
        wanted["serverAuth"] = ExtendedKeyUsageOID.SERVER_AUTH
    if missing := [name for name, oid in wanted.items() if oid not in usages]:
        raise CertificateError(
            f"the certificate's extended key usage does not suit a {identity.role}",
            where=where,
            got=f"none of {' and '.join(missing)}",
            wanted=" and ".join(wanted),
        )


def certificates_in(pem: bytes, *, where: object) -> list[x509.Certificate]:
    """The certificates in a PEM file, at least one; `rt.CertificateError` naming `where` otherwise."""
    with reading(where, "no certificate in the file", wanted="-----BEGIN CERTIFICATE-----, in PEM"):
        return x509.load_pem_x509_certificates(pem)


def private_key_in(pem: bytes, *, where: object) -> PrivateKeyTypes:
    """The private key, without passphrase, in a PEM file; `rt.CertificateError` naming `where` otherwise."""
    with reading(where, "no private key in the file", wanted="a key in PEM without a passphrase"):
        return load_pem_private_key(pem, password=None)


@contextlib.contextmanager
def reading(where: object, what: str, *, wanted: str | None = None) -> Iterator[None]:
    """Turn what `cryptography` says about bad input into `rt.CertificateError`.

    Its own words are left out, and not chained either: they may quote a file that holds a key.
    """
    try:
        yield
    except RtError:
        raise
    except _UNREADABLE:
        raise CertificateError(what, where=where, wanted=wanted) from None


def read_file(path: StrPath, *, hint: str | None = None, flags: int = 0) -> bytes:
    """A whole regular file; `rt.CertificateError` if it cannot be had or is above `FILE_BYTES_MAX`."""
    where = os.fspath(path)
    try:
        # O_NONBLOCK, so that a FIFO in its place cannot hang us.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CertificateError("not a regular file", where=where, hint=hint)
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise CertificateError("cannot read the file", where=where, got=error.strerror, hint=hint) from error
    if len(content) > FILE_BYTES_MAX:
        raise CertificateError("the file is too large", where=where, wanted=f"at most {FILE_BYTES_MAX} bytes")
    return content


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """A path to `content` for calls that want one; in memory, gone at the end."""
    fd = os.memfd_create("rt-tls")
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{fd}"
