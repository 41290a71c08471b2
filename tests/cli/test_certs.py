"""`rt certs`: its output, its exit statuses, and the input that it rejects."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, pkcs12
from cryptography.x509.oid import NameOID

from rt.cli.commands.certs import certs
from rt.errors import CertificateError, InvalidName, RtError, StorageError
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS


def run(*arguments: object, **environment: str) -> Result:
    result = CliRunner().invoke(
        certs, [str(argument) for argument in arguments], env=environment, auto_envvar_prefix="RT_CERTS"
    )
    if isinstance(result.exception, RtError):
        raise result.exception
    return result


def run_well(*arguments: object, **environment: str) -> Result:
    result = run(*arguments, **environment)
    assert result.exit_code == 0, result.output
    return result


def test_init_and_issue_write_files_accepted_by_tls(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    made = run_well("init", pki)
    assert made.stdout == ""
    assert f"Wrote {pki / 'ca.crt'}, valid until" in made.stderr
    issued = run_well(
        *("issue", pki, "--stream", "s", "--role", "publisher", "--name", "f1"),
        *("--dedup-id", "d1", "--dedup-id", "d2", "--lease", "g1", "--lease", "g2"),
    )
    assert issued.stdout == ""
    assert f"Wrote {pki / 'f1.crt'} and {pki / 'f1.key'}, valid until" in issued.stderr
    tls = TLS(pki / "ca.crt", pki / "f1.crt", pki / "f1.key")
    groups = frozenset({"g1", "g2"})
    assert tls.identity == Identity("s", "publisher", "f1", frozenset({"d1", "d2"}), groups)
    assert "leases     g1 g2" in run_well("show", pki / "f1.crt").stdout


def test_issue_adds_hosts_of_options_to_node_certificate(tmp_path: Path) -> None:
    run_well("init", tmp_path)
    run_well(
        *("issue", tmp_path, "--stream", "s", "--role", "node", "--name", "n1", "--loopback"),
        *("--dns", "a.example", "--dns", "b.example", "--ip", "10.0.0.1", "--ip", "::2"),
    )
    shown = json.loads(run_well("show", "--json", tmp_path / "n1.crt").stdout)
    assert shown["dns"] == ["n1", "a.example", "b.example", "localhost"]
    assert shown["ip"] == ["10.0.0.1", "::2", "127.0.0.1", "::1"]


def test_init_and_issue_read_options_from_environment(tmp_path: Path) -> None:
    run_well("init", tmp_path, RT_CERTS_INIT_DAYS="20")
    run_well(
        *("issue", tmp_path, "--name", "f1"),
        RT_CERTS_ISSUE_STREAM="s",
        RT_CERTS_ISSUE_ROLE="publisher",
        RT_CERTS_ISSUE_DEDUP_ID="d1 d2",
        RT_CERTS_ISSUE_DAYS="3",
    )
    ca, leaf = run_well("show", "--json", tmp_path / "ca.crt", tmp_path / "f1.crt").stdout.splitlines()
    assert json.loads(ca)["days_left"] == 19
    assert (json.loads(leaf)["days_left"], json.loads(leaf)["dedup"]) == (2, ["d1", "d2"])


def test_issue_replaces_existing_pair_only_with_renew_option(tmp_path: Path) -> None:
    run_well("init", tmp_path)
    arguments = ("issue", tmp_path, "--stream", "s", "--role", "operator", "--name", "o1")
    run_well(*arguments)
    with pytest.raises(CertificateError, match="--renew"):
        run(*arguments)
    run_well(*arguments, "--renew")


@pytest.mark.parametrize(
    "options",
    [
        ["--role", "publisher", "--dns", "x"],
        ["--role", "publisher", "--ip", "::1"],
        ["--role", "operator", "--loopback"],
        ["--role", "node", "--dedup-id", "d"],
        ["--role", "operator", "--lease", "g"],
        ["--role", "node", "--ip", "n1"],
        ["--role", "admin"],
        ["--role", "node", "--days", "0"],
        ["--role", "node", "--days", "1000000000"],
        [],
    ],
)
def test_issue_with_invalid_options_exits_with_2_and_writes_nothing(
    tmp_path: Path, options: list[str]
) -> None:
    run_well("init", tmp_path)
    before = sorted(tmp_path.iterdir())
    assert run("issue", tmp_path, "--stream", "s", "--name", "n1", *options).exit_code == 2
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "..", ".x", "-x", "a/b", "", "a b", "a\n", "x" * 129, "ä"]
)
@pytest.mark.parametrize("option", ["--name", "--stream", "--dedup-id", "--lease"])
def test_issue_raises_invalid_name_for_unsafe_name_and_writes_nothing(
    tmp_path: Path, option: str, name: str
) -> None:
    run_well("init", tmp_path / "pki")
    before = sorted(tmp_path.rglob("*"))
    names = {"--name": "f1", "--stream": "s", "--dedup-id": "d", option: name}
    with pytest.raises(InvalidName):
        run(
            "issue",
            tmp_path / "pki",
            "--role",
            "publisher",
            *[f"{key}={value}" for key, value in names.items()],
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_issue_without_ca_suggests_certs_init(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="rt certs init"):
        run("issue", tmp_path / "x", "--stream", "s", "--role", "operator", "--name", "o1")


# --- show -------------------------------------------------------------------------------------------------


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    """Return a CA that is valid since 100 days ago, with one valid and one expired publisher certificate."""
    start = datetime.now(UTC) - timedelta(days=100)
    init_ca(tmp_path, now=start)
    issue(tmp_path, Identity("s", "publisher", "f1", frozenset({"d2", "d1"})))
    issue(tmp_path, Identity("s", "operator", "late"), days=50, now=start)
    return tmp_path


def test_show_prints_identity_validity_and_issuer(pki: Path) -> None:
    result = run_well("show", pki / "f1.crt")
    certificate = x509.load_pem_x509_certificate((pki / "f1.crt").read_bytes())
    lines = result.stdout.splitlines()
    assert lines[0] == f"{pki / 'f1.crt'}: rt://s/publisher/f1"
    fields = dict(line.strip().split(maxsplit=1) for line in lines[1:])
    assert fields["kind"] == "publisher"
    assert fields["dedup"] == "ids  d1 d2"
    assert fields["issuer"].startswith("CN=rt development CA ")
    assert fields["state"] == "valid, 397 days left"
    assert fields["SHA-256"] == certificate.fingerprint(SHA256()).hex()
    assert result.stderr == ""


def test_show_prints_one_json_object_per_line(pki: Path) -> None:
    lines = run_well("show", "--json", pki / "f1.crt", pki / "late.crt", pki / "ca.crt").stdout.splitlines()
    leaf, late, ca = map(json.loads, lines)
    assert (leaf["who"], leaf["state"], leaf["problem"]) == ("rt://s/publisher/f1", "valid", None)
    assert (leaf["stream"], leaf["role"], leaf["name"]) == ("s", "publisher", "f1")
    assert (late["who"], late["state"], late["days_left"]) == ("rt://s/operator/late", "expired", -51)
    assert (ca["ca"], ca["role"], ca["problem"]) == (True, None, None)
    assert leaf.keys() == late.keys() == ca.keys()


def test_show_prints_every_certificate_of_file(pki: Path) -> None:
    bundle = pki / "bundle"
    bundle.write_bytes(
        (pki / "f1.crt").read_bytes() + (pki / "f1.key").read_bytes() + (pki / "ca.crt").read_bytes()
    )
    result = run_well("show", "--json", bundle)
    assert [json.loads(line)["ca"] for line in result.stdout.splitlines()] == [False, True]
    assert "PRIVATE" not in result.output


@pytest.mark.parametrize("kind", ["key", "empty", "garbage", "binary", "missing", "directory", "endless"])
def test_show_of_file_without_certificate_fails_and_prints_no_content(pki: Path, kind: str) -> None:
    path = pki / "it"
    match kind:
        case "key":
            path = pki / "f1.key"
        case "empty":
            path.write_bytes(b"")
        case "garbage":
            path.write_text("SECRET\n" * 1000)
        case "binary":
            path.write_bytes(b"-----BEGIN CERTIFICATE-----\nSECRET\xff\0\n-----END CERTIFICATE-----\n")
        case "directory":
            path.mkdir()
        case "endless":
            path = Path("/dev/zero")
    with pytest.raises(CertificateError) as caught:
        run("show", path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400
    assert "SECRET" not in str(caught.value)
    assert "PRIVATE" not in str(caught.value)


def strange(pki: Path, *names: x509.GeneralName, common_name: str = "x", start: int = -1) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.now(UTC) + timedelta(days=start))
        .not_valid_after(datetime.now(UTC) + timedelta(days=start + 10))
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    path = pki / "strange.crt"
    path.write_bytes(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
    return path


def test_show_prints_problem_of_certificate_without_valid_identity(pki: Path) -> None:
    shown = json.loads(run_well("show", "--json", strange(pki, x509.DNSName("h"))).stdout)
    assert (shown["who"], shown["role"], shown["dns"]) == ("CN=x", None, ["h"])
    assert "must name one identity" in shown["problem"]
    assert "problem" in run_well("show", strange(pki)).stdout


def test_show_reports_certificate_starting_tomorrow_as_not_yet_valid(pki: Path) -> None:
    assert json.loads(run_well("show", "--json", strange(pki, start=1)).stdout)["state"] == "not yet valid"


def test_control_characters_of_certificate_are_escaped_in_output_and_errors(pki: Path) -> None:
    hostile = "\x1b[2J\n\rvalid\u202e"
    path = strange(pki, x509.DNSName("\x1b[2J\n"), common_name=hostile)
    for arguments in (["show", path], ["show", "--json", path]):
        shown = run_well(*arguments).stdout
        assert all(character.isprintable() or character == "\n" for character in shown)
    assert run_well("show", path).stdout.count("\n") == 7
    with pytest.raises(RtError) as caught:
        TLS(pki / "ca.crt", path, pki / "f1.key")
    assert "\x1b" not in str(caught.value)


def test_renew_replaces_only_certificates_expiring_soon_or_named(tmp_path: Path) -> None:
    run_well("init", tmp_path)
    common = ("issue", tmp_path, "--stream", "s", "--role", "publisher")
    run_well(*common, "--name", "soon", "--days", 20)
    run_well(*common, "--name", "late", "--days", 40)
    before = {name: (tmp_path / f"{name}.crt").read_bytes() for name in ("soon", "late", "ca")}
    renewed = run_well("renew", tmp_path)
    assert f"Wrote {tmp_path / 'soon.crt'} and {tmp_path / 'soon.key'}, valid until" in renewed.stderr
    changed = [name for name, content in before.items() if (tmp_path / f"{name}.crt").read_bytes() != content]
    assert changed == ["soon"]
    assert "No certificate" in run_well("renew", tmp_path).stderr
    assert f"Wrote {tmp_path / 'late.crt'}" in run_well("renew", tmp_path, "late").stderr
    with pytest.raises(CertificateError, match=r"nobody.crt"):
        run("renew", tmp_path, "nobody")


def test_issue_writes_p12_file_only_with_p12_option(tmp_path: Path) -> None:
    run_well("init", tmp_path)
    common = ("issue", tmp_path, "--stream", "s", "--role", "operator", "--name", "ops")
    assert run(*common, "--p12-password", "x").exit_code == 2
    issued = run_well(*common, "--p12")
    assert f"{tmp_path / 'ops.key'} and {tmp_path / 'ops.p12'}, valid until" in issued.stderr
    assert pkcs12.load_pkcs12((tmp_path / "ops.p12").read_bytes(), None).key is not None
