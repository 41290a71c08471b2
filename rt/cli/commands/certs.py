"""`rt certs`: make certificates for development, and show certificates. `rt.net.dev_pki` makes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import click
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from msgspec import Struct
from msgspec.structs import asdict

from rt.cli.options import CERTIFICATE_NAME, ExistingPath, json_option, option
from rt.errors import CertificateError
from rt.net.cert_files import State, certificates_in, read_file, state_of
from rt.net.dev_pki import CA_DAYS, LEAF_DAYS, Address, init_ca, issue, renew, write_p12
from rt.net.identity import LEASE_ROLES, ROLES, Identity, Role, identity_of, reading
from rt.net.k8s_certs import api_of, keep, read_order

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_DAYS = click.IntRange(min=1, max=36500)


@click.group()
def certs() -> None:
    """Make certificates for development, and show certificates."""


@certs.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@option("--days", type=_DAYS, default=CA_DAYS, help="Validity of the CA. Days.")
def init(directory: Path, days: int) -> None:
    """Make a CA in DIR.

    ca.crt is public: all nodes and clients need it. ca.key is secret: with it anyone can issue certificates.
    """
    _wrote(init_ca(directory, days=days))


@certs.command("issue")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@option("--stream", required=True, help="Name of the stream.")
@option("--role", required=True, type=click.Choice(ROLES), help="What the holder may do.")
@option(
    "--name",
    required=True,
    help="Name of the holder. For a node: the name of the member, which is also a host name.",
)
@option(
    "--dedup-id",
    "dedup",
    multiple=True,
    metavar="ID",
    help="With --role publisher: a dedup id that it may use. Repeatable. Default: none.",
)
@option(
    "--lease",
    multiple=True,
    metavar="GROUP",
    help="A group of leases that the holder may take. Repeatable. Default: none.",
)
@option(
    "--dns",
    multiple=True,
    metavar="HOST",
    help="With --role node: a further host name. Repeatable. Default: none.",
)
@option(
    "--ip",
    multiple=True,
    metavar="IP",
    type=ip_address,
    help="With --role node: an IP address. Repeatable. Default: none.",
)
@option("--loopback", is_flag=True, help="With --role node: also valid for localhost, 127.0.0.1 and ::1.")
@option(
    "--days", type=_DAYS, default=LEAF_DAYS, help="Validity of the certificate, at most that of the CA. Days."
)
@option(
    "--renew", is_flag=True, help="Replace the certificate and key of that name. Default: fail if they exist."
)
@option("--p12", is_flag=True, help="Write NAME.p12 too, which browsers import.")
@option(
    "--p12-password", default="", metavar="TEXT", help="Password of NAME.p12. Default: none, as for NAME.key."
)
def issue_(
    directory: Path,
    stream: str,
    role: Role,
    name: str,
    dedup: tuple[str, ...],
    lease: tuple[str, ...],
    dns: tuple[str, ...],
    ip: tuple[Address, ...],
    loopback: bool,
    days: int,
    renew: bool,
    p12: bool,
    p12_password: str,
) -> None:
    """Issue NAME.crt and NAME.key, signed by the CA in DIR.

    Only the certificate of a node carries host names. A publisher may push the session NAME and the sessions
    whose names start with NAME~.
    """
    if role != "node" and (dns or ip or loopback):
        raise click.UsageError("--dns, --ip and --loopback need --role node.")
    if role != "publisher" and dedup:
        raise click.UsageError("--dedup-id needs --role publisher.")
    if role not in LEASE_ROLES and lease:
        raise click.UsageError("--lease needs --role publisher or subscriber.")
    if p12_password and not p12:
        raise click.UsageError("--p12-password needs --p12.")
    identity = Identity(stream, role, name, frozenset(dedup), frozenset(lease))
    issued = issue(directory, identity, dns=dns, ips=ip, loopback=loopback, days=days, renew=renew)
    bundle = [write_p12(directory, name, password=p12_password)] if p12 else []
    _wrote(issued.cert, issued.key, *bundle)


@certs.command("renew")
@click.argument("directory", metavar="DIR", type=ExistingPath(file_okay=False, path_type=Path))
@click.argument("names", metavar="[NAME]...", nargs=-1, type=CERTIFICATE_NAME)
@option(
    "--within",
    type=click.IntRange(min=0),
    default=30,
    metavar="DAYS",
    help="Without NAME: renew each certificate that expires within this time. Days.",
)
@option("--days", type=_DAYS, default=LEAF_DAYS, help="Validity of a new certificate. Days.")
def renew_(directory: Path, names: tuple[str, ...], within: int, days: int) -> None:
    """Issue certificates again: new keys, the same identities, rights and host names.

    Without NAME, all certificates in DIR that expire soon. Programs that run notice the new files and use
    them; nothing needs a restart. A NAME.p12 is not renewed.
    """
    due = names or tuple(_due(directory, datetime.now(UTC) + timedelta(days=within)))
    for name in due:
        issued = renew(directory, name, days=days)
        _wrote(issued.cert, issued.key)
    if not due:
        click.echo(f"No certificate in {directory} expires within {within} days.", err=True)


def _due(directory: Path, until: datetime) -> Iterator[str]:
    """The names of the certificates that expire before `until`. The CA is not one of them."""
    for file in sorted(directory.glob("*.crt")):
        certificate = certificates_in(read_file(file), where=file)[0]
        if not _is_ca(certificate) and certificate.not_valid_after_utc <= until:
            yield file.stem


@certs.command()
@click.argument("order", metavar="FILE", type=ExistingPath(dir_okay=False, path_type=Path))
def kubernetes(order: Path) -> None:
    """Make the certificates that FILE lists, as Kubernetes Secrets. The job of the Helm chart calls this.

    A certificate that exists and does not expire soon is kept. The CA is made if its Secret is empty.
    """
    wanted = read_order(read_file(order).decode(errors="replace"), where=order)
    changed = keep(wanted, api_of(os.environ))
    kept = 1 + len(wanted.certificates) - len(changed)
    click.echo(f"Made {', '.join(changed) or 'none'}; kept {kept}.", err=True)


@certs.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@json_option
def show(files: tuple[str, ...], as_json: bool) -> None:
    """Show the certificates in each FILE: identity, validity, issuer, and what is wrong with them."""
    now = datetime.now(UTC)
    for file in files:
        for certificate in certificates_in(read_file(file), where=file):
            with reading(file, "the certificate is malformed"):
                shown = _shown(file, certificate, now)
            click.echo(json.dumps(asdict(shown)) if as_json else "\n".join(_lines(shown)))


def _wrote(*paths: Path) -> None:
    certificate = certificates_in(read_file(paths[0]), where=paths[0])[0]
    until = certificate.not_valid_after_utc
    click.echo(f"Wrote {' and '.join(map(str, paths))}, valid until {until:%F}.", err=True)


class _CertificateRow(Struct, frozen=True):
    """What `show` prints about a certificate; the fields are the keys of `--json`."""

    file: str
    who: str
    """The `rt://` identity; of a CA or another certificate, the subject."""
    stream: str | None
    role: str | None
    name: str | None
    dedup: list[str]
    lease: list[str]
    dns: list[str]
    ip: list[str]
    ca: bool
    issuer: str
    valid_from: str
    valid_until: str
    days_left: int
    state: State
    fingerprint: str
    problem: str | None
    """Why rt would refuse it, apart from chain and validity; None for a CA."""


def _shown(file: str, certificate: x509.Certificate, now: datetime) -> _CertificateRow:
    ca, names = _is_ca(certificate), _alternative_names(certificate)
    identity, problem = None, None
    try:
        identity = identity_of(certificate)
    except CertificateError as error:
        problem = None if ca else str(error)
    return _CertificateRow(
        file=file,
        who=identity.uri if identity else certificate.subject.rfc4514_string(),
        stream=identity.stream if identity else None,
        role=identity.role if identity else None,
        name=identity.name if identity else None,
        dedup=sorted(identity.dedup_ids) if identity else [],
        lease=sorted(identity.lease_groups) if identity else [],
        dns=names.get_values_for_type(x509.DNSName),
        ip=[str(address) for address in names.get_values_for_type(x509.IPAddress)],
        ca=ca,
        issuer=certificate.issuer.rfc4514_string(),
        valid_from=f"{certificate.not_valid_before_utc:%FT%TZ}",
        valid_until=f"{certificate.not_valid_after_utc:%FT%TZ}",
        days_left=(certificate.not_valid_after_utc - now).days,
        state=state_of(certificate, now),
        fingerprint=certificate.fingerprint(SHA256()).hex(),
        problem=problem,
    )


def _is_ca(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _lines(shown: _CertificateRow) -> Iterator[str]:
    """A heading, and a line for each field that is not empty."""
    yield _plain(f"{shown.file}: {shown.who}")
    for label, value in (
        ("kind", "CA" if shown.ca else shown.role),
        ("dedup ids", " ".join(shown.dedup)),
        ("leases", " ".join(shown.lease)),
        ("hosts", " ".join([*shown.dns, *shown.ip])),
        ("issuer", shown.issuer),
        ("valid", f"{shown.valid_from} to {shown.valid_until}"),
        ("state", shown.state + (f", {shown.days_left} days left" if shown.state == "valid" else "")),
        ("SHA-256", shown.fingerprint),
        ("problem", shown.problem),
    ):
        if value:
            yield _plain(f"  {label:10} {value}")


def _plain(text: str) -> str:
    """The text without control characters: a certificate may be hostile."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )
