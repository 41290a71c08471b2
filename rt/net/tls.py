"""TLS material read from files that may be replaced at any moment.

Invariants:
- The files that `TLS.load` returns match each other (key to certificate, certificate to CA, at this moment).
- No rotation changes the identity.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field  # noqa: TID251
from datetime import UTC, datetime

from rt.errors import CertificateError
from rt.names import check_name
from rt.net.cert_files import CertFiles, StrPath, check, read_file
from rt.net.identity import Identity
from rt.option_checks import check_path

_PAUSES_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
"""Pauses between reads of files that do not match. A rotation needs microseconds between its renames, or more
on a busy machine.
"""

logger = logging.getLogger("rt.net")

_warned_keys: set[tuple[str, int]] = set()
"""The path and the mode of keys that others can read: each is logged once, although many clients load it."""


@dataclass(frozen=True, slots=True)
class TLS:
    """Paths of PEM files: the CA or CAs that peers must chain to, our certificate, its private key.

    The certificate may be followed by its intermediates; the key has no passphrase. The constructor reads and
    checks the files, and raises `rt.CertificateError` for an invalid one. `load` reads later contents.
    """

    ca: StrPath
    cert: StrPath
    key: StrPath
    identity: Identity = field(init=False, compare=False)
    """From the files as they were at construction. A rotation may change its dedup ids, nothing else."""

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key"):
            check_path(getattr(self, name), name=name)
        object.__setattr__(self, "identity", self._load().identity)

    @classmethod
    def from_directory(cls, directory: StrPath, name: str) -> TLS:
        """`ca.crt`, `NAME.crt` and `NAME.key` in a directory, as `rt certs issue` writes them."""
        check_name(name, kind="certificate")
        file = os.path.join(directory, name)
        return cls(os.path.join(directory, "ca.crt"), f"{file}.crt", f"{file}.key")

    def load(self) -> CertFiles:
        """Read the files as they are now, and check that they are valid and match.

        Invalid files may be in the middle of a rotation: they are read again for up to 0.13 s before
        `rt.CertificateError` is raised. Then a caller keeps the credentials that it has.
        """
        loaded = self._load()
        if loaded.identity.uri != self.identity.uri:
            raise CertificateError(
                "the certificate was replaced by one of another identity",
                where=os.fspath(self.cert),
                got=loaded.identity.uri,
                expected=self.identity.uri,
                hint="Restart the process to give it another identity.",
            )
        return loaded

    def changed(self, since: CertFiles) -> bool:
        """Whether the files differ from `since`, or cannot be read."""
        try:
            return self._read() != (since.ca, since.cert, since.key)
        except CertificateError:
            return True

    def ssl_server_context(self) -> ssl.SSLContext:
        """For TLS 1.3 with the credentials of `load`. Peers must have a certificate of our CA."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # A resumed session would not check the peer's certificate again.
        return context

    def ssl_client_context(self) -> ssl.SSLContext:
        """For TLS 1.3 with the credentials of `load`. The peer's SANs must contain the dialled host."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _load(self) -> CertFiles:
        for pause_s in _PAUSES_S:
            with contextlib.suppress(CertificateError):
                return self._load_once()
            time.sleep(pause_s)
        return self._load_once()

    def _load_once(self) -> CertFiles:
        files = os.fspath(self.ca), os.fspath(self.cert), os.fspath(self.key)
        credentials = check(*self._read(), now=datetime.now(UTC), files=files)
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.stat(self.key).st_mode)
            if mode & stat.S_IROTH and (files[2], mode) not in _warned_keys:
                _warned_keys.add((files[2], mode))
                logger.warning("key_readable_by_others path=%r mode=%04o", files[2], mode)
        return credentials

    def _read(self) -> tuple[bytes, bytes, bytes]:
        return read_file(self.ca), read_file(self.cert), read_file(self.key)

    def _context(self, protocol: int) -> ssl.SSLContext:
        credentials = self.load()
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # As in `check` and in gRPC, every certificate in the CA file is trusted, even if it is not a root.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            with _memory_file(credentials.cert) as cert, _memory_file(credentials.key) as key:
                context.load_cert_chain(cert, key)
            # Comments in a CA bundle may be UTF-8, which this call rejects.
            context.load_verify_locations(cadata=credentials.ca.decode("ascii", "ignore"))
        except ssl.SSLError as error:
            raise CertificateError(
                "OpenSSL rejects the certificate", where=os.fspath(self.cert), got=error.reason
            ) from error
        return context


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """A path to `content` in memory, for calls that need a path."""
    fd = os.memfd_create("rt-tls")
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{fd}"
