"""A PostgreSQL server with its own data directory, on the loopback and a Unix socket, with TLS.

The programs come from the system's package. A server does not run as root: root starts it as another user.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import psycopg
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rt.objects import PostgresStore
from sequencer.localcluster.loopback import free_port

USER: Final = "rt"
PASSWORD: Final = "a secret / of: the @ server"
WAIT_S: Final = 120

_SETTINGS: Final = {
    "fsync": "off",  # no test cuts the power of the server's machine
    "shared_buffers": "16MB",
    "max_connections": "40",
    "autovacuum_naptime": "10min",
    "ssl": "on",
}


def missing() -> str | None:
    """Why no server can run here; None if one can."""
    if _programs() is None:
        return "PostgreSQL's server is not installed: apt-get install postgresql"
    if os.getuid() == 0 and _account() is None:
        return "a PostgreSQL server does not run as root, and there is no other user"
    return None


class PostgresServer:
    """A running server. Call `stop` and `start`, or `kill`.

    `environment`: of its processes. A server that tests share must not have the mark by which a test kills
    the processes that it started. `primary`: this server is a standby of that one, whose commits wait for it.
    """

    def __init__(
        self, environment: dict[str, str] | None = None, *, primary: PostgresServer | None = None
    ) -> None:
        self._environment: Final = environment or dict(os.environ)
        self.directory: Final = Path(tempfile.mkdtemp(prefix="rtpg", dir="/tmp"))
        self.port: Final = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            if primary is None:
                self._initialize()
            else:
                self._copy(primary)
            self.start()
            if primary is not None:
                primary.run("ALTER SYSTEM SET synchronous_standby_names = '*'")
                primary.run("SELECT pg_reload_conf()")
                primary.wait("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The URL through the Unix socket, without a password."""
        return f"postgresql://{USER}@/postgres?host={self.directory}&port={self.port}"

    def tcp_url(self, *, host: str = "127.0.0.1", password: str = PASSWORD, **options: str) -> str:
        more = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items())
        return f"postgresql://{USER}:{quote(password, safe='')}@{host}:{self.port}/postgres?{more}"

    def store(self, directory: Path, name: str = "state", **options: Any) -> PostgresStore:
        """Return the store of this name and directory. The same arguments always give the same schema."""
        return PostgresStore(self.url, schema=self.schema(directory, name), **options)

    @staticmethod
    def schema(directory: Path, name: str = "state") -> str:
        return f"s{hashlib.sha256(f'{directory}/{name}'.encode()).hexdigest()[:24]}"

    def run(self, statement: Any, values: Any = None) -> list[tuple[Any, ...]]:
        """Run a statement as the administrator."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            found = connection.execute(statement, values)
            return found.fetchall() if found.description else []

    def restore(self, copied: bytes) -> None:
        """Run what `dump` returned."""
        command = [_program("psql"), "--quiet", "--no-psqlrc", "-v", "ON_ERROR_STOP=1", "--dbname", self.url]
        subprocess.run(command, check=True, input=copied, stdout=subprocess.DEVNULL)

    def wait(self, statement: Any, values: Any = None) -> None:
        """Wait until the statement finds a row."""
        deadline = time.monotonic() + WAIT_S
        while not self.run(statement, values):
            assert time.monotonic() < deadline, statement
            time.sleep(0.02)

    def terminate(self, schema: str) -> None:
        """End the connections of a store, and wait for their end."""
        own = f"rt store {schema}"
        ended = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = %s"
        self.run(ended, [own])

    def start(self) -> None:
        assert self._process is None
        settings = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
        place = ["-k", str(self.directory), "-p", str(self.port), "-h", "127.0.0.1"]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [_program("postgres"), "-D", str(self.directory / "data"), *place, *settings],
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=self._environment,
                **_as_user(),
            )
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                self.run("SELECT 1")
                return
            log_text = (self.directory / "log").read_text(errors="replace")
            assert self._process.poll() is None, log_text
            assert time.monotonic() < deadline, log_text
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once, as a crash does: `pg_ctl stop -m immediate`."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        """Disconnect the clients, and end."""
        self._end(signal.SIGINT)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, sent: signal.Signals) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(sent)
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _copy(self, primary: PostgresServer) -> None:
        if (account := _account()) is not None and os.getuid() == 0:
            os.chown(self.directory, account.pw_uid, account.pw_gid)
        source = f"host={primary.directory} port={primary.port} user={USER}"
        options = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        subprocess.run(
            [_program("pg_basebackup"), "-D", str(self.directory / "data"), "-d", source, *options],
            check=True,
            cwd=self.directory,
            **_as_user(),
        )

    def _initialize(self) -> None:
        secret = self.directory / "password"
        secret.write_text(PASSWORD)
        _write_certificates(self.directory)
        if (account := _account()) is not None and os.getuid() == 0:
            for path in (self.directory, *self.directory.iterdir()):
                os.chown(path, account.pw_uid, account.pw_gid)
        data = self.directory / "data"
        options = ["-U", USER, "--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={secret}"]
        done = subprocess.run(
            [_program("initdb"), "-D", str(data), "--no-sync", "-E", "UTF8", "--locale=C", *options],
            capture_output=True,
            text=True,
            cwd=self.directory,
            check=False,
            **_as_user(),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with (data / "postgresql.conf").open("a") as settings:
            for name in ("cert", "key"):
                settings.write(f"ssl_{name}_file = '{self.directory}/server.{name}'\n")


def _programs() -> Path | None:
    """The directory of the newest server's programs."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if found:
        return max(found, key=lambda path: int(path.parts[-3])).parent
    path = shutil.which("postgres")
    return None if path is None else Path(path).parent


def _program(name: str) -> str:
    directory = _programs()
    assert directory is not None
    return str(directory / name)


def dump(url: str, schema: str) -> bytes:
    """Return the output of `pg_dump` for a schema."""
    command = [_program("pg_dump"), "--schema", schema, "--dbname", url]
    return subprocess.run(command, check=True, capture_output=True).stdout


def _account() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


def _as_user() -> dict[str, Any]:
    account = _account()
    if os.getuid() != 0 or account is None:
        return {}
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _write_certificates(directory: Path) -> None:
    """Write `ca.crt` and the certificate of `localhost` and 127.0.0.1. `other.crt`: another authority."""
    now = datetime.now(UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def build(subject: str, issuer: str, key: Any) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(name(issuer), name(subject), key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=subject == issuer, path_length=None), critical=True)
        )

    keys = {each: ec.generate_private_key(ec.SECP256R1()) for each in ("ca", "other", "server")}
    for each in ("ca", "other"):
        made = build(each, each, keys[each]).sign(keys[each], hashes.SHA256())
        (directory / f"{each}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    server = build("localhost", "ca", keys["server"]).add_extension(names, critical=False)
    signed = server.sign(keys["ca"], hashes.SHA256())
    (directory / "server.cert").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key = keys["server"].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / "server.key").write_bytes(key)
    (directory / "server.key").chmod(0o600)
