"""Certificates, identities and TLS contexts: checks, handshakes, renewal and CA rotation."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import ssl
import threading
import warnings
from base64 import encodebytes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given, settings
from hypothesis import strategies as st
from module_shadow import shadow

from rt.errors import CertificateError, InvalidName
from rt.names import is_name
from rt.net import tls as module
from rt.net.cert_files import FILE_BYTES_MAX, check
from rt.net.dev_pki import IssuedCertificate, init_ca, issue
from rt.net.identity import ROLES, Identity, identity_from_uris, identity_of
from rt.net.tls import TLS

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


# --- a PKI in memory with arbitrary errors ----------------------------------------------------------------


class Holder:
    """A key and its certificate. `extensions` replace those of a publisher (or of a CA)."""

    def __init__(self, name: str, issuer: Holder | None = None, *, ca: bool = False, **wrong: object) -> None:
        self.key = wrong.get("key") or ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.certificate.subject if issuer else subject)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(wrong.get("start", NOW - DAY))
            .not_valid_after(wrong.get("end", NOW + DAY))
        )
        if "constraints" not in wrong or wrong["constraints"]:
            constraints = wrong.get("constraints", x509.BasicConstraints(ca, None))
            builder = builder.add_extension(constraints, critical=True)
        uris = wrong.get("uris", [] if ca else [f"rt://s/publisher/{name}"])
        if uris:
            names = [x509.UniformResourceIdentifier(uri) for uri in uris]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        for extension in wrong.get("extensions", []):
            builder = builder.add_extension(extension, critical=False)
        self.certificate = builder.sign((issuer or self).key, SHA256())

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


ROOT = Holder("root", ca=True)
LEAF = Holder("f1", ROOT)


def usage(*, cert_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(True, False, False, False, False, cert_sign, cert_sign, False, False)


# --- identities -------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
IDENTITIES = st.builds(Identity, NAMES, st.sampled_from(ROLES), NAMES) | st.builds(
    Identity, NAMES, st.just("publisher"), NAMES, st.frozensets(NAMES, max_size=4)
)
PARTS = (
    st.sampled_from(["", "s", "dedup", "node", "publisher", "..", "x y", "ä", "\n", "\0", "~"]) | st.text()
)
URIS = st.text() | st.builds("rt://{}/{}/{}".format, PARTS, PARTS, PARTS) | st.builds("rt:{}".format, PARTS)


@given(IDENTITIES)
@settings(deadline=None)
def test_identity_survives_round_trip_through_its_uris(identity: Identity) -> None:
    assert identity_from_uris(identity.uris) == identity


@given(st.lists(URIS, max_size=5))
@settings(max_examples=250, deadline=None)
def test_arbitrary_uris_yield_valid_identity_or_are_rejected(uris: list[str]) -> None:
    try:
        identity = identity_from_uris(uris)
    except CertificateError:
        return
    assert all(map(is_name, [identity.stream, identity.name, *identity.dedup_ids]))
    assert identity.role in ROLES
    assert set(identity.uris) <= set(uris)


@pytest.mark.parametrize("role", ROLES)
def test_role_is_read_from_uri(role: str) -> None:
    assert identity_from_uris([f"rt://s/{role}/x"]) == Identity("s", role, "x")


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["https://s/node/n1", "spiffe://s/node/n1"],
        ["rt://s/node/n1", "rt://s/node/n2"],
        ["rt://s/node/n1", "rt://s/node/n1"],
        ["rt://s/node/n1", "rt://s/operator/n1"],
        ["rt://s/dedup/d"],
        ["rt://s/admin/n1"],
        ["rt://s/Node/n1"],
        ["RT://s/node/n1"],
        ["rt://s/node/n1", "RT://s/operator/n1"],
        ["rt:/s/node/n1"],
        ["rt:s/node/n1"],
        ["rt://s/node"],
        ["rt://s/node/"],
        ["rt:///node/n1"],
        ["rt://s/node/n1/"],
        ["rt://s/node/n1\n"],
        ["rt://s/node/n1?x"],
        ["rt://s/node/n1#x"],
        ["rt://u@s/node/n1"],
        ["rt://s:1/node/n1"],
        ["rt://s/node/.."],
        ["rt://s/node/../publisher/x"],
        ["rt://s/node/%6e1"],
        ["rt://s/node/n1~x"],
        ["rt://s/node/n\N{CYRILLIC SMALL LETTER A}1"],
        ["rt://s/node/" + "n" * 129],
        ["rt://s/publisher/f1", "rt://t/dedup/d"],
        ["rt://s/publisher/f1", "rt://s/dedup/../d"],
        ["rt://s/subscriber/f1", "rt://s/dedup/d"],
        ["rt://s/publisher/f1", "rt://nonsense"],
        ["rt://s/lease/g"],
        ["rt://s/subscriber/f1", "rt://t/lease/g"],
        ["rt://s/subscriber/f1", "rt://s/lease/g/h"],
        ["rt://s/node/n1", "rt://s/lease/g"],
        ["rt://s/operator/f1", "rt://s/lease/g"],
    ],
)
def test_uris_without_exactly_one_identity_are_rejected(uris: list[str]) -> None:
    with pytest.raises(CertificateError):
        identity_from_uris(uris)


def test_uris_of_other_schemes_are_ignored() -> None:
    uris = ["spiffe://cluster/ns/x", "rt://s/publisher/f1", "https://example.org", "rt://s/dedup/d"]
    assert identity_from_uris(uris) == Identity("s", "publisher", "f1", frozenset({"d"}))


@pytest.mark.parametrize("fields", [("..", "node", "n"), ("s", "node", "a/b"), ("s", "node", "")])
def test_identity_with_invalid_name_raises_invalid_name(fields: tuple[str, ...]) -> None:
    with pytest.raises(InvalidName):
        Identity(*fields)


def test_lease_groups_survive_round_trip_through_identity_uris() -> None:
    both = Identity("s", "publisher", "f1", frozenset({"d"}), frozenset({"g", "h"}))
    reader = Identity("s", "subscriber", "r1", frozenset(), frozenset({"g"}))
    assert reader.uris == ["rt://s/subscriber/r1", "rt://s/lease/g"]
    for one in (both, reader):
        assert identity_from_uris(one.uris) == one


def test_identity_with_invalid_dedup_id_raises_invalid_name() -> None:
    with pytest.raises(InvalidName):
        Identity("s", "publisher", "f1", frozenset({"a b"}))


def test_peer_certificate_yields_its_identity() -> None:
    assert identity_of(LEAF.certificate) == Identity("s", "publisher", "f1")


def test_dns_name_in_uri_form_is_not_accepted_as_identity() -> None:
    posing = x509.SubjectAlternativeName([x509.DNSName("rt://s/operator/x")])
    with pytest.raises(CertificateError, match="must name one identity"):
        identity_of(Holder("x", ROOT, uris=[], extensions=[posing]).certificate)


def test_common_name_is_not_accepted_as_identity() -> None:
    with pytest.raises(CertificateError, match="must name one identity"):
        identity_of(Holder("rt://s/operator/x", ROOT, uris=[]).certificate)


# --- matching credentials ---------------------------------------------------------------------------------


def test_valid_credentials_pass_check_and_report_identity_and_expiry() -> None:
    credentials = check(ROOT.pem, LEAF.pem, LEAF.key_pem, now=NOW)
    assert (credentials.ca, credentials.cert, credentials.key) == (ROOT.pem, LEAF.pem, LEAF.key_pem)
    assert credentials.identity == Identity("s", "publisher", "f1")
    assert credentials.not_after == NOW + DAY
    assert credentials.fingerprint == LEAF.certificate.fingerprint(SHA256()).hex()


def test_key_of_another_certificate_is_rejected() -> None:
    with pytest.raises(CertificateError, match=r"key is not the certificate's \(at KEY\).*CERT"):
        check(ROOT.pem, LEAF.pem, Holder("f1", ROOT).key_pem, now=NOW, files=("CA", "CERT", "KEY"))


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (NOW - DAY - timedelta(seconds=1), "not yet valid.*clock"),
        (NOW - DAY, None),
        (NOW + DAY, None),
        (NOW + DAY + timedelta(seconds=1), "expired.*`rt certs renew DIR NAME`"),
    ],
)
def test_certificate_is_valid_from_first_to_last_second_of_its_period(
    now: datetime, what: str | None
) -> None:
    root = Holder("root", ca=True, start=NOW - 9 * DAY, end=NOW + 9 * DAY)
    leaf = Holder("f1", root)
    if what is None:
        check(root.pem, leaf.pem, leaf.key_pem, now=now)
        return
    with pytest.raises(CertificateError, match=what):
        check(root.pem, leaf.pem, leaf.key_pem, now=now)


def chains(leaf: Holder, ca: bytes, *intermediates: Holder) -> bool:
    try:
        check(ca, leaf.pem + b"".join(each.pem for each in intermediates), leaf.key_pem, now=NOW)
    except CertificateError as error:
        if "chain" not in error.what:
            raise
        return False
    return True


def test_intermediates_are_accepted_in_any_order() -> None:
    middle = Holder("middle", ROOT, ca=True)
    low = Holder("low", middle, ca=True)
    leaf = Holder("f1", low)
    assert chains(leaf, ROOT.pem, low, middle)
    assert chains(leaf, ROOT.pem, middle, low)
    assert not chains(leaf, ROOT.pem, low)
    assert not chains(leaf, ROOT.pem)
    assert chains(leaf, middle.pem, low), "what stands in the CA file is trusted, a root or not"


def test_trust_anchor_is_found_among_several_in_ca_file() -> None:
    other, again = Holder("other", ca=True), Holder("root", ca=True)
    assert chains(LEAF, other.pem + again.pem + b"a comment: \xc3\xa4\n" + ROOT.pem)
    assert not chains(LEAF, other.pem + again.pem)


@pytest.mark.parametrize(
    "wrong",
    [
        {"end": NOW - timedelta(hours=1)},
        {"start": NOW + timedelta(hours=1)},
        {"constraints": x509.BasicConstraints(False, None)},
        {"constraints": None},
        {"extensions": [usage(cert_sign=False)]},
    ],
)
def test_chain_through_issuer_not_entitled_to_issue_is_rejected(wrong: dict[str, object]) -> None:
    root = Holder("root", ca=True, **wrong)
    assert not chains(Holder("f1", root), root.pem)
    middle = Holder("middle", ROOT, ca=True, **wrong)
    assert not chains(Holder("f1", middle), ROOT.pem, middle)


def test_path_length_constraint_limits_intermediates() -> None:
    root = Holder("root", ca=True, constraints=x509.BasicConstraints(True, 0))
    middle = Holder("middle", root, ca=True)
    assert chains(Holder("f1", root), root.pem)
    assert not chains(Holder("f1", middle), root.pem, middle)


def test_certificate_issued_by_leaf_is_rejected() -> None:
    assert not chains(Holder("f2", LEAF), ROOT.pem, LEAF)


def test_self_signed_leaf_certificate_is_rejected() -> None:
    itself = Holder("f1")
    assert not chains(itself, ROOT.pem, itself)


@pytest.mark.parametrize(
    ("role", "usages", "good"),
    [
        ("publisher", [ExtendedKeyUsageOID.CLIENT_AUTH], True),
        ("publisher", [ExtendedKeyUsageOID.SERVER_AUTH], False),
        ("node", [ExtendedKeyUsageOID.CLIENT_AUTH], False),
        ("node", [ExtendedKeyUsageOID.SERVER_AUTH], False),
        ("node", [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH], True),
    ],
)
def test_extended_key_usage_must_match_role(
    role: str, usages: list[x509.ObjectIdentifier], good: bool
) -> None:
    leaf = Holder("x", ROOT, uris=[f"rt://s/{role}/x"], extensions=[x509.ExtendedKeyUsage(usages)])
    if good:
        check(ROOT.pem, leaf.pem, leaf.key_pem, now=NOW)
        return
    with pytest.raises(CertificateError, match="extended key usage"):
        check(ROOT.pem, leaf.pem, leaf.key_pem, now=NOW)


def test_key_with_passphrase_is_rejected() -> None:
    locked = LEAF.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    with pytest.raises(CertificateError, match="without a passphrase"):
        check(ROOT.pem, LEAF.pem, locked, now=NOW)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\0", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_error_names_file_with_invalid_pem_content(place: int, content: bytes) -> None:
    contents = [ROOT.pem, LEAF.pem, LEAF.key_pem]
    contents[place] = content
    with pytest.raises(CertificateError) as caught:
        check(*contents, now=NOW, files=("CA", "CERT", "KEY"))
    assert caught.value.where == ("CA", "CERT", "KEY")[place]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_certificate_raises_only_certificate_error(data: st.DataObject) -> None:
    der = bytearray(LEAF.certificate.public_bytes(Encoding.DER))
    for place in data.draw(st.lists(st.integers(0, len(der) - 1), min_size=1, max_size=4)):
        der[place] = data.draw(st.integers(0, 255))
    mutated = b"-----BEGIN CERTIFICATE-----\n" + encodebytes(der) + b"-----END CERTIFICATE-----\n"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pems in ((ROOT.pem, mutated), (mutated, LEAF.pem), (ROOT.pem, LEAF.pem + mutated)):
            with contextlib.suppress(CertificateError):
                check(*pems, LEAF.key_pem, now=NOW)


# --- files ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> dict[str, IssuedCertificate]:
    """Pairs of one CA by name, which no test changes. `stranger` is from another CA, and `late` has
    expired.
    """
    directory = tmp_path_factory.mktemp("pki")
    start = datetime.now(UTC) - 10 * DAY
    init_ca(directory, now=start)
    init_ca(directory / "other")
    node, publisher = Identity("s", "node", "n1"), Identity("s", "publisher", "f1")
    return {
        "node": issue(directory, node, loopback=True),
        "publisher": issue(directory, publisher),
        "late": issue(directory, Identity("s", "publisher", "late"), days=5, now=start),
        "late node": issue(directory, Identity("s", "node", "late-node"), dns=["n1"], days=5, now=start),
        "stranger": issue(directory / "other", publisher),
        "strange node": issue(directory / "other", node),
    }


@pytest.fixture
def pair(tmp_path: Path) -> IssuedCertificate:
    """Return a new pair that the test may change."""
    init_ca(tmp_path)
    return issue(tmp_path, Identity("s", "publisher", "f1"))


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES_S", ())


def test_tls_reports_identity_of_its_certificate(pair: IssuedCertificate) -> None:
    assert TLS(*pair).identity == Identity("s", "publisher", "f1")


def test_tls_accepts_text_paths_and_is_picklable_and_frozen(pair: IssuedCertificate) -> None:
    tls = TLS(*map(str, pair))
    assert pickle.loads(pickle.dumps(tls)) == tls  # noqa: S301 - our own bytes
    with pytest.raises(FrozenInstanceError):
        tls.ca = "x"


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("missing", "No such file"),
        ("directory", "cannot read|not a regular file"),
        ("fifo", "not a regular file"),
        ("endless", "not a regular file"),
        ("too large", "too large"),
    ],
)
def test_error_names_unreadable_file(pair: IssuedCertificate, place: int, kind: str, what: str) -> None:
    path = pair[place]
    path.unlink()
    match kind:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "too large":
            path.write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    with pytest.raises(CertificateError, match=what) as caught:
        TLS(*pair)
    assert caught.value.where == str(path)


@pytest.mark.usefixtures("_impatient")
def test_key_bytes_never_appear_in_errors_logs_or_reprs(
    pair: IssuedCertificate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    pair.key.chmod(0o644)
    tls = TLS(*pair)
    secret = pair.key.read_text().splitlines()[1]
    said = [repr(tls), str(tls), repr(tls.load()), str(tls.load())]
    broken = pair.key.read_text().replace("PRIVATE KEY", "PRIVATE KEX")
    for files in [(pair.ca, pair.key, pair.key), (pair.key, pair.cert, pair.key)]:
        with pytest.raises(CertificateError) as caught:
            TLS(*files)
        said += [repr(caught.value), str(caught.value), repr(caught.value.__dict__)]
        assert caught.value.__cause__ is None, "what cryptography says may quote the file"
        assert caught.value.__suppress_context__
    pair.key.write_text(broken)
    with pytest.raises(CertificateError) as caught:
        tls.load()
    said += [repr(caught.value), str(caught.value), caplog.text]
    assert not any(secret in text or "BEGIN" in text.replace("-----BEGIN CERT", "") for text in said)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o604, True)])
def test_key_readable_by_others_is_loaded_with_one_warning(
    pair: IssuedCertificate, mode: int, warned: bool, logged: Callable[[str], list[str]]
) -> None:
    pair.key.chmod(mode)
    for _ in range(2):
        TLS(*pair).load()
    lines = logged("rt.net")
    assert lines == ([f"key_readable_by_others path={str(pair.key)!r} mode={mode:04o}"] if warned else [])


# --- rotation ---------------------------------------------------------------------------------------------


def test_renewed_certificate_is_detected_and_loaded(pair: IssuedCertificate) -> None:
    tls = TLS(*pair)
    before = tls.load()
    assert not tls.changed(before)
    issue(pair.ca.parent, Identity("s", "publisher", "f1", frozenset({"d"})), renew=True)
    assert tls.changed(before)
    after = tls.load()
    assert after.fingerprint != before.fingerprint
    assert after.identity.dedup_ids == {"d"}
    assert not tls.changed(after)


def test_change_of_ca_file_alone_is_detected(pair: IssuedCertificate, tmp_path: Path) -> None:
    tls = TLS(*pair)
    before = tls.load()
    pair.ca.write_bytes(before.ca + init_ca(tmp_path / "new").read_bytes())
    assert tls.changed(before)
    assert tls.load().fingerprint == before.fingerprint


def test_missing_certificate_file_counts_as_changed(pair: IssuedCertificate) -> None:
    tls = TLS(*pair)
    before = tls.load()
    pair.cert.unlink()
    assert tls.changed(before)


@pytest.mark.usefixtures("_impatient")
def test_reload_with_another_identity_is_rejected(pair: IssuedCertificate) -> None:
    tls = TLS(*pair)
    other = issue(pair.ca.parent, Identity("s", "publisher", "f2"))
    other.key.replace(pair.key)
    other.cert.replace(pair.cert)
    with pytest.raises(CertificateError, match="another identity"):
        tls.load()
    assert TLS(*pair).identity.name == "f2"


@pytest.mark.parametrize("torn", ["ca", "cert", "key"])
def test_load_stays_consistent_if_renewed_between_file_reads(
    pair: IssuedCertificate, torn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = TLS(*pair)
    before = tls.load()
    renewals = [Identity("s", "publisher", "f1")]

    def read_file(path: Path) -> bytes:
        content = real(path)
        if path == getattr(pair, torn) and renewals:
            issue(pair.ca.parent, renewals.pop(), renew=True)
        return content

    real = module.read_file
    monkeypatch.setattr(module, "read_file", read_file)
    loaded = tls.load()
    check(loaded.ca, loaded.cert, loaded.key, now=datetime.now(UTC))
    # The key is read last. A renewal after that read leaves a complete old pair.
    assert (loaded.fingerprint == before.fingerprint) == (torn == "key")


def test_partly_written_certificate_is_read_again_until_complete(
    pair: IssuedCertificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pair.cert.read_bytes()
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        pair.cert.write_bytes(whole[: len(whole) // 4 * len(pauses)] if len(pauses) < 4 else whole)

    shadow(monkeypatch, module, "time", sleep=sleep)
    pair.cert.write_bytes(b"")
    assert TLS(*pair).identity.name == "f1"
    assert len(pauses) == 4


def test_loads_succeed_during_concurrent_renewals(pair: IssuedCertificate) -> None:
    tls = TLS(*pair)
    enough = threading.Event()

    def renew() -> None:
        while not enough.is_set():
            issue(pair.ca.parent, Identity("s", "publisher", "f1"), renew=True)

    with ThreadPoolExecutor(1) as pool:
        renewer = pool.submit(renew)
        try:
            seen: set[str] = set()
            while len(seen) < 30 and not renewer.done():
                seen.add(tls.load().fingerprint)
        finally:
            enough.set()
        renewer.result()


# --- handshakes over loopback -----------------------------------------------------------------------------


def serve(listener: socket.socket, context: ssl.SSLContext) -> dict[str, object]:
    plain, _ = listener.accept()
    with plain:
        plain.settimeout(30)
        with context.wrap_socket(plain, server_side=True) as peer:
            peer.sendall(peer.recv(1))
            return {"version": peer.version(), "peer": peer.getpeercert(binary_form=True)}


def dial(address: tuple[str, int], context: ssl.SSLContext, host: str) -> bytes:
    with (
        socket.create_connection(address, timeout=120) as plain,
        context.wrap_socket(plain, server_hostname=host) as peer,
    ):
        peer.sendall(b"?")
        return peer.recv(1)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "n1") -> dict[str, object]:
    """Return what the server saw of an accepted client; raise the error of the side that refused."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(30)
        served = pool.submit(serve, listener, server)
        try:
            answer = dial(listener.getsockname(), client, host)
        except ssl.SSLCertVerificationError:
            served.exception()
            raise
        except OSError:
            served.result()
            raise
        seen = served.result()
    assert answer == b"?"
    return seen


def client_without_certificate(ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    return context


def raw(protocol: int, issued: IssuedCertificate, ca: Path) -> ssl.SSLContext:
    """Return a context as a hostile peer would create it, with `ca` as trusted CA."""
    context = ssl.SSLContext(protocol)
    context.load_cert_chain(issued.cert, issued.key)
    context.load_verify_locations(ca)
    return context


VERIFY_CODE = {"expired": 10, "unknown CA": 20, "purpose": 26, "host name": 62, "address": 64}


@pytest.mark.parametrize("host", ["n1", "localhost", "127.0.0.1", "::1"])
def test_certificates_of_same_ca_complete_tls_1_3_handshake(
    pki: dict[str, IssuedCertificate], host: str
) -> None:
    server, client = TLS(*pki["node"]), TLS(*pki["publisher"])
    seen = handshake(server.ssl_server_context(), client.ssl_client_context(), host)
    assert seen["version"] == "TLSv1.3"
    assert identity_of(x509.load_der_x509_certificate(seen["peer"])) == client.identity


def test_development_pki_certificates_pass_strict_x509_checks(
    pki: dict[str, IssuedCertificate],
) -> None:
    server, client = TLS(*pki["node"]).ssl_server_context(), TLS(*pki["publisher"]).ssl_client_context()
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    handshake(server, client)


def test_node_certificate_works_as_server_and_client(pki: dict[str, IssuedCertificate]) -> None:
    node = TLS(*pki["node"])
    handshake(node.ssl_server_context(), node.ssl_client_context())


def test_client_without_certificate_is_rejected(pki: dict[str, IssuedCertificate]) -> None:
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        handshake(TLS(*pki["node"]).ssl_server_context(), client_without_certificate(pki["node"].ca))


@pytest.mark.parametrize(("who", "why"), [("stranger", "unknown CA"), ("late", "expired")])
def test_client_with_untrusted_or_expired_certificate_is_rejected(
    pki: dict[str, IssuedCertificate], who: str, why: str
) -> None:
    client = raw(ssl.PROTOCOL_TLS_CLIENT, pki[who], pki["node"].ca)
    with pytest.raises(ssl.SSLCertVerificationError) as caught:
        handshake(TLS(*pki["node"]).ssl_server_context(), client)
    assert caught.value.verify_code == VERIFY_CODE[why]


@pytest.mark.parametrize(
    ("who", "host", "why"),
    [
        ("strange node", "n1", "unknown CA"),
        ("late node", "n1", "expired"),
        ("publisher", "f1", "purpose"),
        ("node", "n2", "host name"),
        ("node", "127.0.0.2", "address"),
    ],
)
def test_server_with_invalid_certificate_is_rejected(
    pki: dict[str, IssuedCertificate], who: str, host: str, why: str
) -> None:
    server = raw(ssl.PROTOCOL_TLS_SERVER, pki[who], pki["node"].ca)
    with pytest.raises(ssl.SSLCertVerificationError) as caught:
        handshake(server, TLS(*pki["publisher"]).ssl_client_context(), host)
    assert caught.value.verify_code == VERIFY_CODE[why]


def test_client_limited_to_tls_1_2_is_rejected(pki: dict[str, IssuedCertificate]) -> None:
    client = TLS(*pki["publisher"]).ssl_client_context()
    client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        handshake(TLS(*pki["node"]).ssl_server_context(), client)


def test_server_limited_to_tls_1_2_is_rejected(pki: dict[str, IssuedCertificate]) -> None:
    server = TLS(*pki["node"]).ssl_server_context()
    server.minimum_version = server.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="PROTOCOL"):
        handshake(server, TLS(*pki["publisher"]).ssl_client_context())


def test_certificates_of_both_cas_work_during_ca_rotation(
    pki: dict[str, IssuedCertificate], tmp_path: Path
) -> None:
    both = tmp_path / "ca.crt"
    both.write_bytes(
        "# CAs für heute\n".encode() + pki["node"].ca.read_bytes() + pki["stranger"].ca.read_bytes()
    )
    server = TLS(both, pki["node"].cert, pki["node"].key)
    for who in ("publisher", "stranger"):
        handshake(server.ssl_server_context(), TLS(both, *pki[who][1:]).ssl_client_context())


def test_handshake_sends_intermediate_certificate(tmp_path: Path) -> None:
    start, end = datetime.now(UTC) - DAY, datetime.now(UTC) + DAY
    middle = Holder("middle", ROOT, ca=True, start=start, end=end)
    names = [x509.UniformResourceIdentifier("rt://s/node/n1"), x509.IPAddress(ip_address("127.0.0.1"))]
    leaf = Holder(
        "n1", middle, uris=[], start=start, end=end, extensions=[x509.SubjectAlternativeName(names)]
    )
    root = Holder("root", ca=True, key=ROOT.key, start=start, end=end)
    paths = IssuedCertificate(tmp_path / "ca.crt", tmp_path / "n1.crt", tmp_path / "n1.key")
    for path, content in zip(paths, (root.pem, leaf.pem + middle.pem, leaf.key_pem), strict=True):
        path.write_bytes(content)
    node = TLS(*paths)
    handshake(node.ssl_server_context(), node.ssl_client_context(), "127.0.0.1")


def test_key_too_weak_for_openssl_raises_certificate_error(
    tmp_path: Path, pki: dict[str, IssuedCertificate]
) -> None:
    ca_key = rsa.generate_private_key(65537, 1024)  # noqa: S505 - its being weak is the point
    start, end = datetime.now(UTC) - DAY, datetime.now(UTC) + DAY
    leaf = Holder(
        "f1", ca=False, key=ca_key, start=start, end=end, constraints=x509.BasicConstraints(True, 0)
    )
    for name, content in (("ca", leaf.pem), ("crt", leaf.pem), ("key", leaf.key_pem)):
        (tmp_path / name).write_bytes(content)
    tls = TLS(tmp_path / "ca", tmp_path / "crt", tmp_path / "key")
    with pytest.raises(CertificateError, match="OpenSSL rejects"):
        tls.ssl_client_context()
