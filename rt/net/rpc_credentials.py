"""TLS material for gRPC that follows its files.

Laws. The files are looked at before each handshake. Ones that do not pass leave the old ones in place and
are logged once. No key reaches a log.
"""

from __future__ import annotations

import contextlib
import logging
import time

import rt.v1  # noqa: F401 - the ciphers, before gRPC loads
from rt.errors import CertificateError
from rt.net.material import Credentials
from rt.net.tls import TLS

# isort: split
import grpc

_RELOAD_PAUSE_S = 1.0  # between attempts to read files that do not pass: peers that knock cost no more

logger = logging.getLogger("rt.net")


def server_credentials(tls: TLS) -> grpc.ServerCredentials:
    """Mutual TLS with the files as they are at each handshake.

    `rt.CertificateError` if they do not pass now.
    """
    material = Reloaded(tls)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        before = material.present
        with contextlib.suppress(Exception):  # into gRPC's native code nothing may be raised
            material.refresh()
        return None if material.present is before else _configuration(material.present)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(material.present),
        fetch,  # type: ignore[arg-type]  # None: as before
        require_client_authentication=True,
    )


def _configuration(of: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(of.key, of.cert)], root_certificates=of.ca)


class Reloaded:
    """Credentials as the files say, or as they last said. `refresh` is called by any thread."""

    def __init__(self, tls: TLS) -> None:
        self.present = tls.load()
        self._tls = tls
        self._failed_at: float | None = None

    def refresh(self) -> Credentials:
        """Look at the files; the credentials to use. Ones that do not pass are logged once."""
        failed_at = self._failed_at
        if failed_at is not None and time.monotonic() < failed_at + _RELOAD_PAUSE_S:
            return self.present
        if not self._tls.changed(self.present):
            self._failed_at = None
            return self.present
        try:
            self.present = self._tls.load()
        except CertificateError as error:
            self._failed_at = time.monotonic()
            if failed_at is None:
                logger.error(
                    "certificate_reload_failed identity=%s error=%r", self._tls.identity.uri, str(error)
                )
            return self.present
        self._failed_at = None
        logger.info(
            "certificate_reloaded identity=%s fingerprint=%s not_after=%s",
            self._tls.identity.uri,
            self.present.fingerprint,
            self.present.not_after.isoformat(),
        )
        return self.present
