"""A PKI for development: one CA in a directory, and the key pairs that it issued.

    <directory>/       0700
        ca.crt         0644  the CA's certificate; may hold several while CAs rotate
        ca.key         0600
        <name>.crt     0644
        <name>.key     0600
        <name>.p12     0600  both and the CA, for browsers; only if asked for

Invariants:
- A key is never readable by other users, not even briefly, and is overwritten only with `renew`.
- Files are written under temporary names, synced and renamed, a key before its certificate. After a crash, a
  key may have no certificate, or with `renew` a pair may not match. The same call, run again, completes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rt.errors import CertificateError, StorageError
from rt.net.cert_files import StrPath, certificates_in, private_key_in, read_file, state_of
from rt.net.identity import Identity, identity_of, reading

Address: TypeAlias = IPv4Address | IPv6Address

CA_DAYS = 3650
LEAF_DAYS = 398  # the longest that browsers accept, so all other programs accept it too
CLOCK_SKEW = timedelta(minutes=5)  # maximum by which a peer's clock may be slow

_CA = "ca"
_COMMON_NAME_MAX = 64  # RFC 5280, ub-common-name; a name of rt may be longer
_LABEL = "[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")


class IssuedCertificate(NamedTuple):
    """The files of a pair and of its CA: `TLS(*issued)`."""

    ca: Path
    cert: Path
    key: Path


def init_ca(directory: StrPath, *, days: int = CA_DAYS, now: datetime | None = None) -> Path:
    """Create a CA in `directory` (created if missing); returns the path of its certificate.

    Valid for `days` from `now`. Raises `rt.CertificateError` if there is a CA, `rt.StorageError` if it cannot
    be written.
    """
    now = now or datetime.now(UTC)
    with _opened(directory, make=True) as fd:
        kept = _key_to_certify(directory, fd, _CA, hint="Take another directory for another CA.")
        key = kept or _new_key()
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        # Two CAs never share a subject: while they rotate, both are in one file.
        subject = _subject(f"rt development CA {identifier.digest.hex()[:8]}")
        builder = (
            _builder(subject, key, now, now + timedelta(days=days))
            .issuer_name(subject)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(ca=True), critical=True)
        )
        _write(fd, _CA, key, builder.sign(key, SHA256()))
    return Path(directory, f"{_CA}.crt")


def issue(
    directory: StrPath,
    identity: Identity,
    *,
    dns: Sequence[str] = (),
    ips: Sequence[Address] = (),
    loopback: bool = False,
    days: int = LEAF_DAYS,
    renew: bool = False,
    now: datetime | None = None,
) -> IssuedCertificate:
    """Issue a new pair `<name>.crt`, `<name>.key` for `identity` with the CA in `directory`.

    Valid for `days` from `now`, but no longer than the CA. The host names in a node's certificate are its
    name (clients dial it), `dns`, `ips`, and with `loopback` also localhost, 127.0.0.1 and ::1. No other
    certificate may have host names. `renew` replaces an existing pair of that name. A reader between the two
    renames sees a pair that does not match, and reads again, as `TLS.load` does.

    Raises `rt.CertificateError` if there is a pair, or no CA; `rt.StorageError` if it cannot be written.
    """
    now = now or datetime.now(UTC)
    if identity.name.lower() == _CA:
        raise CertificateError("the name is reserved for the CA's own files", got=identity.name)
    if loopback:
        dns, ips = [*dns, "localhost"], [*ips, ip_address("127.0.0.1"), ip_address("::1")]
    names = _alternative_names(identity, dns, ips)
    with _opened(directory) as fd:
        ca, ca_key = _load_ca(directory, now)
        hint = "Use --renew to replace it with a new pair."
        kept = None if renew else _key_to_certify(directory, fd, identity.name, hint=hint)
        key = kept or _new_key()
        until = min(now + timedelta(days=days), ca.not_valid_after_utc)
        builder = (
            _builder(_subject(identity.name), key, now, until)
            .issuer_name(ca.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(_extended_key_usage(identity), critical=False)
            .add_extension(_authority(ca), critical=False)
            .add_extension(names, critical=False)
        )
        _write(fd, identity.name, key, builder.sign(ca_key, SHA256()))
    cert = Path(directory, f"{identity.name}.crt")
    return IssuedCertificate(Path(directory, f"{_CA}.crt"), cert, cert.with_name(f"{identity.name}.key"))


def write_p12(directory: StrPath, name: str, *, password: str = "") -> Path:
    """Write `NAME.p12` for browsers: the pair of that name and the CA. Replaces an existing one.

    Without a password, the key in it is as unprotected as in `NAME.key`. Raises `rt.CertificateError` if
    there is no such pair, `rt.StorageError` if it cannot be written.
    """
    ca_file, cert_file = Path(directory, f"{_CA}.crt"), Path(directory, f"{name}.crt")
    key = _ec_key(cert_file.with_name(f"{name}.key"))
    leaf, *_ = certificates_in(read_file(cert_file), where=cert_file)
    anchors = certificates_in(read_file(ca_file), where=ca_file)
    encryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    content = pkcs12.serialize_key_and_certificates(name.encode(), key, leaf, anchors, encryption)
    with _opened(directory) as fd:
        _replace(fd, {f"{name}.p12": (content, 0o600)})
    return Path(directory, f"{name}.p12")


def renew(
    directory: StrPath, name: str, *, days: int = LEAF_DAYS, now: datetime | None = None
) -> IssuedCertificate:
    """Issue the pair of that name again: a new key, the same identity, grants and hosts.

    Raises as `issue` does, and `rt.CertificateError` if there is no certificate of that name.
    """
    file = Path(directory, f"{name}.crt")
    leaf, *_ = certificates_in(read_file(file, hint="`rt certs issue` makes one."), where=file)
    with reading(file, "the certificate is malformed"):
        identity = identity_of(leaf)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        dns, ips = names.get_values_for_type(x509.DNSName), names.get_values_for_type(x509.IPAddress)
    addresses = [ip for ip in ips if isinstance(ip, Address)]
    return issue(directory, identity, dns=dns, ips=addresses, days=days, renew=True, now=now)


def _alternative_names(
    identity: Identity, dns: Sequence[str], ips: Sequence[Address]
) -> x509.SubjectAlternativeName:
    if identity.role != "node" and (dns or ips):
        raise CertificateError(
            "only a node's certificate may have host names and addresses", got=f"role {identity.role}"
        )
    if identity.role == "node":
        own = _address(identity.name)
        dns, ips = (dns, [own, *ips]) if own else ([identity.name, *dns], ips)
    for host in dns:
        if not _HOST.fullmatch(host) or _address(host):
            # Wildcards are refused too: with one, a node could impersonate another node.
            raise CertificateError("not a host name", got=repr(host)[:200], hint="Use --ip for addresses.")
    return x509.SubjectAlternativeName(
        [
            *map(x509.UniformResourceIdentifier, identity.uris),
            *map(x509.DNSName, dict.fromkeys(dns)),
            *map(x509.IPAddress, dict.fromkeys(ips)),
        ]
    )


def _address(text: str) -> Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _subject(common_name: str) -> x509.Name:
    """The subject is only for people: rt does not evaluate it."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:_COMMON_NAME_MAX])])


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _extended_key_usage(identity: Identity) -> x509.ExtendedKeyUsage:
    """Only a node may be a server; nodes are clients too."""
    server = [ExtendedKeyUsageOID.SERVER_AUTH] if identity.role == "node" else []
    return x509.ExtendedKeyUsage([*server, ExtendedKeyUsageOID.CLIENT_AUTH])


def _authority(ca: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    identifier = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)


def _load_ca(directory: StrPath, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The certificate in the CA's file that matches its key, and the key."""
    hint = "`rt certs init` makes a CA."
    path = Path(directory, f"{_CA}.crt")
    key = _ec_key(path.with_suffix(".key"), hint=hint)
    for ca in certificates_in(read_file(path, hint=hint), where=path):
        with reading(path, "the CA's certificate is not one that `rt certs init` makes"):
            if ca.public_key() == key.public_key():
                _authority(ca)
                if (state := state_of(ca, now)) != "valid":
                    raise CertificateError(
                        f"the CA is {state}", where=path, hint="`rt certs init` makes another."
                    )
                return ca, key
    raise CertificateError("the CA's key belongs to none of its certificates", where=path)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _ec_key(path: Path, *, hint: str | None = None) -> ec.EllipticCurvePrivateKey:
    """Read a key, but never through a symbolic link, which another user may have planted."""
    key = private_key_in(read_file(path, hint=hint, flags=os.O_NOFOLLOW), where=path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError("wrong kind of key", where=path, expected="an elliptic-curve key")
    return key


def _key_to_certify(
    directory: StrPath, fd: int, stem: str, *, hint: str
) -> ec.EllipticCurvePrivateKey | None:
    """The key that an interrupted call left without a certificate, or None.

    Raises `rt.CertificateError` if there is a certificate.
    """
    if _is_there(f"{stem}.crt", fd):
        raise CertificateError(
            "there is a certificate of that name", where=Path(directory, f"{stem}.crt"), hint=hint
        )
    return _ec_key(Path(directory, f"{stem}.key")) if _is_there(f"{stem}.key", fd) else None


def _is_there(name: str, fd: int) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _opened(directory: StrPath, *, make: bool = False) -> Iterator[int]:
    """The directory's descriptor, locked against other issuers. Converts `OSError` to `rt.StorageError`."""
    try:
        if make:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_mode & 0o022:
                raise CertificateError(
                    "other users may write in the directory", where=directory, hint=f"chmod 700 {directory}"
                )
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        hint = "`rt certs init` makes it." if isinstance(error, FileNotFoundError) else None
        raise StorageError(
            "cannot use the directory of certificates", where=directory, got=error.strerror, hint=hint
        ) from error


def _write(fd: int, stem: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    """Replace the pair with two renames, the key first. Durable on return."""
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = certificate.public_bytes(Encoding.PEM)
    _replace(fd, {f"{stem}.key": (private, 0o600), f"{stem}.crt": (public, 0o644)})


def _replace(fd: int, files: Mapping[str, tuple[bytes, int]]) -> None:
    """Replace files, in this order. `files` has the content and the mode of each. Durable on return."""
    try:
        for name, (content, mode) in files.items():
            _write_aside(fd, name, content, mode)
        for name in files:
            os.rename(_aside(name), name, src_dir_fd=fd, dst_dir_fd=fd)
        os.fsync(fd)
    finally:
        for name in files:
            _remove(fd, _aside(name))


def _write_aside(fd: int, name: str, content: bytes, mode: int) -> None:
    """Write a new temporary file. An existing one, which may be a link to elsewhere, is unlinked first."""
    _remove(fd, _aside(name))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(_aside(name), flags, mode, dir_fd=fd), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove(fd: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=fd)


def _aside(name: str) -> str:
    return f".{name}.new"  # Names of rt never start with a dot.
