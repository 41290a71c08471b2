"""`rt certs`: certificates for development, and a look into any certificate.

Data goes to stdout, words to stderr. Deciding and writing is in `rt.net.certs`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

import click
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from rt.errors import CertificateError
from rt.net.certs import CA_DAYS, LEAF_DAYS, Address, init_ca, issue
from rt.net.cluster_secrets import api_of, keep
from rt.net.identity import LEASE_ROLES, ROLES, Identity, Role, identity_of, reading
from rt.net.material import State, certificates_in, read_file, state_of
from rt.net.wanted import read_order

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_DAYS = click.IntRange(min=1, max=36500)


@click.group()
def certs() -> None:
    """Make certificates for development, look at any."""


@certs.command()
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--days", type=_DAYS, default=CA_DAYS, show_default=True, help="How long the CA is valid.")
def init(directory: Path, days: int) -> None:
    """Make a CA in DIR: ca.crt for everyone, ca.key for nobody else."""
    _wrote(init_ca(directory, days=days))


@certs.command("issue")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--stream", required=True, help="The stream it is for.")
@click.option("--role", required=True, type=click.Choice(ROLES), help="What its holder may do.")
@click.option("--name", required=True, help="Its holder; a node's own host name.")
@click.option("--dedup", multiple=True, metavar="ID", help="Dedup id that a publisher may use; repeatable.")
@click.option("--lease", multiple=True, metavar="GROUP", help="Group of leases that it may hold; repeatable.")
@click.option("--dns", multiple=True, metavar="HOST", help="Further host name of a node; repeatable.")
@click.option("--ip", multiple=True, metavar="IP", type=ip_address, help="Address of a node; repeatable.")
@click.option("--loopback", is_flag=True, help="A node's: localhost, 127.0.0.1 and ::1 as well.")
@click.option(
    "--days", type=_DAYS, default=LEAF_DAYS, show_default=True, help="How long; the CA's end is the limit."
)
@click.option("--renew", is_flag=True, help="Replace the pair of that name by a new one.")
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
) -> None:
    """Issue NAME.crt and NAME.key by the CA in DIR.

    Only a node's certificate carries host names: its own and those given. A publisher may push the sessions
    NAME and NAME~anything.
    """
    if role != "node" and (dns or ip or loopback):
        raise click.UsageError("--dns, --ip and --loopback go with --role node only.")
    if role != "publisher" and dedup:
        raise click.UsageError("--dedup goes with --role publisher only.")
    if role not in LEASE_ROLES and lease:
        raise click.UsageError("--lease goes with --role publisher or subscriber only.")
    identity = Identity(stream, role, name, frozenset(dedup), frozenset(lease))
    issued = issue(directory, identity, dns=dns, ips=ip, loopback=loopback, days=days, renew=renew)
    _wrote(issued.cert, issued.key)


@certs.command()
@click.argument("order", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def kubernetes(order: Path) -> None:
    """Keep the certificates that FILE wants in Secrets; for the job of the Helm chart, in a pod.

    Those that are there, with time left, stay as they are. The CA is made if its Secret is empty.
    """
    wanted = read_order(read_file(order).decode(errors="replace"), where=order)
    changed = keep(wanted, api_of(os.environ))
    kept = 1 + len(wanted.certificates) - len(changed)
    click.echo(f"Made {', '.join(changed) or 'none'}; {kept} stayed as they were.", err=True)


@certs.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One object a line.")
def show(files: tuple[str, ...], as_json: bool) -> None:
    """Say whom the certificates in each FILE name, for how long, and by which CA."""
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


@dataclass(frozen=True, slots=True)
class _Shown:
    """What `show` says of a certificate; the fields are the keys of `--json`."""

    file: str
    who: str
    """Its `rt://` identity; for a CA or a certificate of another kind, its subject."""
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
    """Why rt would refuse it as a peer's or its own, apart from chain and time; None for a CA."""


def _shown(file: str, certificate: x509.Certificate, now: datetime) -> _Shown:
    ca, names = _is_ca(certificate), _alternative_names(certificate)
    identity, problem = None, None
    try:
        identity = identity_of(certificate)
    except CertificateError as error:
        problem = None if ca else str(error)
    return _Shown(
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


def _lines(shown: _Shown) -> Iterator[str]:
    """A heading and a line for each field that says something."""
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
    """A certificate is a stranger's text: nothing in it may steer the terminal."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )
