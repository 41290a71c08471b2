"""The development PKI: certificate contents, file permissions, and recovery from crashes."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID

from rt.errors import CertificateError, StorageError
from rt.net.cert_files import check
from rt.net.dev_pki import CA_DAYS, CLOCK_SKEW, LEAF_DAYS, IssuedCertificate, init_ca, issue, renew, write_p12
from rt.net.identity import ROLES, Identity, identity_of
from rt.net.tls import TLS

NOW = datetime(2030, 1, 1, tzinfo=UTC)
NODE = Identity("s", "node", "n1")
PUBLISHER = Identity("s", "publisher", "f1", frozenset({"d1", "d2"}))


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    init_ca(tmp_path / "pki")
    return tmp_path / "pki"


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def extension(path: Path, kind: type) -> x509.Extension:
    return certificate(path).extensions.get_extension_for_class(kind)


def listing(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- certificate contents ---------------------------------------------------------------------------------


def test_ca_certificate_has_path_length_0_and_signing_usages_only(pki: Path) -> None:
    ca = pki / "ca.crt"
    constraints = extension(ca, x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    usage = extension(ca, x509.KeyUsage)
    assert usage.critical
    assert usage.value == x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    assert extension(ca, x509.SubjectKeyIdentifier)
    certificate(ca).verify_directly_issued_by(certificate(ca))


@pytest.mark.parametrize("role", ROLES)
def test_leaf_certificate_has_identity_and_key_usages_of_its_role(pki: Path, role: str) -> None:
    identity = Identity("s", role, "x1")
    cert = issue(pki, identity).cert
    assert identity_of(certificate(cert)) == identity
    constraints = extension(cert, x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=False, path_length=None)
    usage = extension(cert, x509.KeyUsage)
    assert usage.critical
    assert usage.value == x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    server = [ExtendedKeyUsageOID.SERVER_AUTH] if role == "node" else []
    assert list(extension(cert, x509.ExtendedKeyUsage).value) == [*server, ExtendedKeyUsageOID.CLIENT_AUTH]
    ca_identifier = extension(pki / "ca.crt", x509.SubjectKeyIdentifier).value
    assert extension(cert, x509.AuthorityKeyIdentifier).value.key_identifier == ca_identifier.digest


def test_keys_use_p_256_and_signatures_use_sha_256(pki: Path) -> None:
    for path in (pki / "ca.crt", issue(pki, NODE).cert):
        assert isinstance(certificate(path).public_key().curve, ec.SECP256R1)
        assert isinstance(certificate(path).signature_hash_algorithm, SHA256)


def test_dedup_ids_are_uri_sans_after_identity(pki: Path) -> None:
    names = extension(issue(pki, PUBLISHER).cert, x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        "rt://s/publisher/f1",
        "rt://s/dedup/d1",
        "rt://s/dedup/d2",
    ]


NO: dict[str, object] = {}


@pytest.mark.parametrize(
    ("name", "options", "dns", "ips"),
    [
        ("n1", NO, ["n1"], []),
        ("10.0.0.1", NO, [], ["10.0.0.1"]),
        ("n1", {"loopback": True}, ["n1", "localhost"], ["127.0.0.1", "::1"]),
        ("n1", {"dns": ["a.example", "n1", "a_b"]}, ["n1", "a.example", "a_b"], []),
        ("n1", {"ips": [ip_address("::2"), ip_address("::2")]}, ["n1"], ["::2"]),
        ("localhost", {"loopback": True}, ["localhost"], ["127.0.0.1", "::1"]),
    ],
)
def test_node_certificate_has_sans_for_its_name_and_given_hosts(
    pki: Path, name: str, options: dict[str, object], dns: list[str], ips: list[str]
) -> None:
    names = extension(
        issue(pki, Identity("s", "node", name), **options).cert, x509.SubjectAlternativeName
    ).value
    assert names.get_values_for_type(x509.DNSName) == dns
    assert names.get_values_for_type(x509.IPAddress) == list(map(ip_address, ips))


@pytest.mark.parametrize("role", [role for role in ROLES if role != "node"])
@pytest.mark.parametrize("options", [{"dns": ["x"]}, {"ips": [ip_address("::1")]}, {"loopback": True}])
def test_hosts_are_refused_for_roles_other_than_node(
    pki: Path, role: str, options: dict[str, object]
) -> None:
    before = listing(pki)
    with pytest.raises(CertificateError, match="only a node's"):
        issue(pki, Identity("s", role, "x1"), **options)
    assert listing(pki) == before


NO_HOSTS = [
    "",
    ".",
    "*",
    "*.example",
    "a..b",
    ".a",
    "a.",
    "a b",
    "-a",
    "a/b",
    "ä.example",
    "a\n",
    "10.0.0.1",
    "::1",
]


@pytest.mark.parametrize("host", [*NO_HOSTS, "x" * 64, "x." * 126 + "xx"])
def test_invalid_host_name_is_refused(pki: Path, host: str) -> None:
    with pytest.raises(CertificateError, match="not a host name"):
        issue(pki, NODE, dns=[host])


@pytest.mark.parametrize("name", ["a..b", "a.", "x" * 64])
def test_node_name_invalid_as_host_name_is_refused(pki: Path, name: str) -> None:
    with pytest.raises(CertificateError, match="not a host name"):
        issue(pki, Identity("s", "node", name))


def test_longest_identity_fits_in_certificate(pki: Path) -> None:
    longest = Identity("s" * 128, "publisher", "x" * 128, frozenset({"d" * 128}))
    assert TLS(*issue(pki, longest)).identity == longest


@pytest.mark.parametrize("name", ["ca", "CA", "Ca"])
def test_certificate_name_ca_is_reserved(pki: Path, name: str) -> None:
    before = listing(pki)
    with pytest.raises(CertificateError, match="reserved"):
        issue(pki, Identity("s", "publisher", name), renew=True)
    assert listing(pki) == before


# --- validity periods -------------------------------------------------------------------------------------


def test_certificates_start_before_now_by_clock_skew_and_last_default_days(tmp_path: Path) -> None:
    ca = certificate(init_ca(tmp_path, now=NOW))
    assert ca.not_valid_before_utc == NOW - CLOCK_SKEW
    assert ca.not_valid_after_utc == NOW + timedelta(days=CA_DAYS)
    leaf = certificate(issue(tmp_path, NODE, now=NOW).cert)
    assert leaf.not_valid_before_utc == NOW - CLOCK_SKEW
    assert leaf.not_valid_after_utc == NOW + timedelta(days=LEAF_DAYS)


def test_leaf_expires_no_later_than_its_ca(tmp_path: Path) -> None:
    ca = certificate(init_ca(tmp_path, days=10, now=NOW))
    leaf = certificate(issue(tmp_path, NODE, now=NOW + timedelta(days=4)).cert)
    assert leaf.not_valid_after_utc == ca.not_valid_after_utc


@pytest.mark.parametrize(("days", "state"), [(-1, "not yet valid"), (11, "expired")])
def test_expired_or_not_yet_valid_ca_issues_no_certificate(tmp_path: Path, days: int, state: str) -> None:
    init_ca(tmp_path, days=10, now=NOW)
    with pytest.raises(CertificateError, match=f"the CA is {state}"):
        issue(tmp_path, NODE, now=NOW + timedelta(days=days))


# --- file permissions -------------------------------------------------------------------------------------


@pytest.fixture
def _no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_no_umask")
def test_key_files_have_mode_0600_regardless_of_umask(tmp_path: Path) -> None:
    init_ca(tmp_path / "deep" / "pki")
    issue(tmp_path / "deep" / "pki", NODE)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "deep").rglob("*")}
    keys, certificates = {"ca.key": 0o600, "n1.key": 0o600}, {"ca.crt": 0o644, "n1.crt": 0o644}
    assert modes == {"pki": 0o700, **keys, **certificates}


@pytest.mark.usefixtures("_no_umask")
def test_key_files_have_mode_0600_throughout_issue_and_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def looking(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            result = real(*arguments, **options)
            keys = [path for path in tmp_path.rglob("*.key*") if not path.is_symlink()]
            seen.update(stat.S_IMODE(path.stat().st_mode) for path in keys)
            return result

        return call

    for name in ("open", "rename", "fsync", "unlink"):
        monkeypatch.setattr(os, name, looking(getattr(os, name)))
    init_ca(tmp_path / "pki")
    issue(tmp_path / "pki", NODE)
    issue(tmp_path / "pki", NODE, renew=True)
    assert seen == {0o600}


def test_keys_are_pkcs8_without_passphrase(pki: Path) -> None:
    assert issue(pki, NODE).key.read_text().startswith("-----BEGIN PRIVATE KEY-----\n")


def test_directory_writable_by_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(CertificateError, match="other users may write"):
        init_ca(tmp_path)
    assert listing(tmp_path) == {}


# --- nothing is overwritten -------------------------------------------------------------------------------


def test_second_ca_in_directory_is_refused(pki: Path) -> None:
    before = listing(pki)
    with pytest.raises(CertificateError, match="there is a certificate"):
        init_ca(pki)
    assert listing(pki) == before


def test_second_issue_of_same_name_is_refused_with_renew_hint(pki: Path) -> None:
    issue(pki, PUBLISHER)
    before = listing(pki)
    with pytest.raises(CertificateError, match="--renew"):
        issue(pki, PUBLISHER)
    assert listing(pki) == before


def test_issue_with_renew_replaces_only_its_key_and_certificate(pki: Path) -> None:
    before = (issue(pki, PUBLISHER), listing(pki))
    assert issue(pki, PUBLISHER, renew=True) == before[0]
    after = listing(pki)
    assert after.keys() == before[1].keys()
    assert {name for name in after if after[name] != before[1][name]} == {"f1.crt", "f1.key"}
    assert TLS(*before[0]).identity == PUBLISHER


def test_issue_with_renew_creates_missing_pair(pki: Path) -> None:
    assert TLS(*issue(pki, PUBLISHER, renew=True)).identity == PUBLISHER


def test_concurrent_issues_of_same_name_create_one_pair(pki: Path) -> None:
    def attempt(_: int) -> IssuedCertificate | None:
        try:
            return issue(pki, PUBLISHER)
        except CertificateError:
            return None

    with ThreadPoolExecutor(8) as pool:
        issued = [result for result in pool.map(attempt, range(8)) if result]
    assert len(issued) == 1
    TLS(*issued[0])


@pytest.mark.parametrize("name", ["f1.key", "f1.crt", ".f1.key.new", ".f1.crt.new"])
@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("renew", [False, True])
def test_symlink_planted_at_target_is_not_followed(
    pki: Path, tmp_path: Path, name: str, dangling: bool, renew: bool
) -> None:
    canary = tmp_path / "canary"
    key = ec.generate_private_key(ec.SECP256R1())
    content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    if not dangling:
        canary.write_bytes(content)
    (pki / name).symlink_to(canary)
    if not renew and not name.startswith("."):
        with pytest.raises(CertificateError):
            issue(pki, PUBLISHER)
    else:
        issued = issue(pki, PUBLISHER, renew=renew)
        TLS(*issued)
        assert not issued.key.is_symlink()
        assert not issued.cert.is_symlink()
        assert issued.key.read_bytes() != content
    assert canary.exists() != dangling
    assert dangling or canary.read_bytes() == content


def test_symlinked_ca_key_is_refused(pki: Path, tmp_path: Path) -> None:
    (pki / "ca.key").rename(tmp_path / "elsewhere")
    (pki / "ca.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CertificateError, match="cannot read"):
        issue(pki, NODE)


# --- crashes ----------------------------------------------------------------------------------------------


class _Crash(BaseException):
    """A crash of the process. No clean-up has an effect after it."""


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the process crash at its `step`th call that changes a file."""
    left = [step]

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise _Crash
            return real(*arguments, **options)

        return call

    for name in ("rename", "fsync", "unlink"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))


@pytest.mark.parametrize("step", range(12))
@pytest.mark.parametrize("renew", [False, True])
def test_repeated_issue_completes_pair_after_crash(tmp_path: Path, step: int, renew: bool) -> None:
    init_ca(tmp_path)
    if renew:
        issue(tmp_path, PUBLISHER)
    key = tmp_path / "f1.key"
    with pytest.MonkeyPatch.context() as patch:
        crash_at(step, patch)
        try:
            issue(tmp_path, PUBLISHER, renew=renew)
            completed = True
        except _Crash:
            completed = (tmp_path / "f1.crt").exists() and not renew
    left = key.read_bytes() if key.exists() else None
    if completed:
        TLS(tmp_path / "ca.crt", tmp_path / "f1.crt", key)
        return
    TLS(*issue(tmp_path, PUBLISHER, renew=renew))
    assert left is None or renew or key.read_bytes() == left, "a key that was in place is kept"
    assert sorted(listing(tmp_path)) == ["ca.crt", "ca.key", "f1.crt", "f1.key"]


@pytest.mark.parametrize("step", range(12))
def test_repeated_init_completes_ca_after_crash_and_keeps_its_key(tmp_path: Path, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        crash_at(step, patch)
        with contextlib.suppress(_Crash):
            init_ca(tmp_path)
    key = tmp_path / "ca.key"
    left = key.read_bytes() if key.exists() else None
    if not (tmp_path / "ca.crt").exists():
        init_ca(tmp_path)
    assert left is None or key.read_bytes() == left
    TLS(*issue(tmp_path, NODE))


def test_failed_write_raises_storage_error_and_leaves_no_files(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listing(pki)

    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="No space left"):
        issue(pki, NODE)
    assert listing(pki) == before


# --- incomplete or wrong directories ----------------------------------------------------------------------


def test_missing_ca_error_suggests_certs_init(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="rt certs init"):
        issue(tmp_path / "missing", NODE)
    with pytest.raises(CertificateError, match="rt certs init"):
        issue(tmp_path, NODE)


def rsa_key() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize("name", ["ca.crt", "ca.key"])
@pytest.mark.parametrize("content", [b"", b"garbage", rsa_key()])
def test_invalid_ca_file_raises_certificate_error_naming_it(pki: Path, name: str, content: bytes) -> None:
    (pki / name).write_bytes(content)
    with pytest.raises(CertificateError) as caught:
        issue(pki, NODE)
    assert str(caught.value.where) == str(pki / name)


def test_ca_error_suggests_certs_init_only_if_ca_key_is_missing(pki: Path) -> None:
    key = pki / "ca.key"
    for make in (key.mkdir, lambda: os.mkfifo(key), lambda: key.symlink_to(key)):
        key.rmdir() if key.is_dir() else key.unlink()
        make()
        with pytest.raises(CertificateError) as caught:
            issue(pki, Identity("trades", "node", "n1"))
        assert (caught.value.where, caught.value.hint) == (str(key), None)
    key.unlink()
    with pytest.raises(CertificateError) as caught:
        issue(pki, Identity("trades", "node", "n1"))
    assert caught.value.hint == "`rt certs init` makes a CA."


def test_ca_key_of_another_ca_is_refused(pki: Path, tmp_path: Path) -> None:
    init_ca(tmp_path / "other")
    (tmp_path / "other" / "ca.key").replace(pki / "ca.key")
    with pytest.raises(CertificateError, match="belongs to none"):
        issue(pki, NODE)


def test_ca_matching_key_issues_if_file_has_two_cas(pki: Path, tmp_path: Path) -> None:
    new = init_ca(tmp_path / "new")
    old = (pki / "ca.crt").read_bytes()
    (pki / "ca.crt").write_bytes(new.read_bytes() + old)
    issued = issue(pki, NODE)
    check(old, issued.cert.read_bytes(), issued.key.read_bytes(), now=datetime.now(UTC))


def test_directory_at_key_path_raises_certificate_or_storage_error(pki: Path) -> None:
    (pki / "f1.key").mkdir()
    with pytest.raises(CertificateError):
        issue(pki, PUBLISHER)
    with pytest.raises(StorageError):
        issue(pki, PUBLISHER, renew=True)
    (pki / "f1.key").rmdir()
    TLS(*issue(pki, PUBLISHER, renew=True))


# --- renewal and browsers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("identity", [NODE, PUBLISHER, Identity("s", "node", "10.0.0.1")])
def test_renewed_certificate_has_new_key_and_same_identity_and_hosts(pki: Path, identity: Identity) -> None:
    more = {"dns": ["n1.example"], "ips": [ip_address("10.0.0.2")]} if identity.role == "node" else {}
    before = certificate(issue(pki, identity, **more).cert)
    after = certificate(renew(pki, identity.name, days=7).cert)
    assert identity_of(after) == identity
    names = x509.SubjectAlternativeName
    assert (
        after.extensions.get_extension_for_class(names).value
        == before.extensions.get_extension_for_class(names).value
    )
    assert after.public_key() != before.public_key()
    assert after.not_valid_after_utc - datetime.now(UTC) < timedelta(days=7)
    assert TLS.from_directory(pki, identity.name).identity == identity


def test_renew_of_missing_reserved_or_invalid_certificate_raises_certificate_error(pki: Path) -> None:
    with pytest.raises(CertificateError, match=r"x.crt.*rt certs issue"):
        renew(pki, "x")
    with pytest.raises(CertificateError):
        renew(pki, "ca")
    (pki / "x.crt").write_text("no PEM")
    with pytest.raises(CertificateError, match=r"x.crt"):
        renew(pki, "x")
    assert sorted(listing(pki)) == ["ca.crt", "ca.key", "x.crt"]


@pytest.mark.parametrize("password", ["", "secret"])
def test_p12_contains_key_certificate_and_ca(pki: Path, password: str) -> None:
    issued = issue(pki, PUBLISHER)
    file = write_p12(pki, "f1", password=password)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="password"):
        pkcs12.load_key_and_certificates(file.read_bytes(), b"wrong")
    key, leaf, cas = pkcs12.load_key_and_certificates(file.read_bytes(), password.encode() or None)
    assert leaf == certificate(issued.cert)
    assert cas == [certificate(pki / "ca.crt")]
    assert key is not None
    assert key.public_key() == leaf.public_key()
