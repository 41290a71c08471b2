"""TLS credentials for gRPC that are reloaded from their files.

The files are checked before each handshake. If they are invalid, the previous credentials stay in use and the
error is logged once. No key is logged.
"""

from __future__ import annotations

import contextlib
import logging
import time

import rt.v1  # noqa: F401 - the ciphers, before gRPC loads
from rt.errors import CertificateError
from rt.net.cert_files import CertFiles
from rt.net.tls import TLS

# isort: split
import grpc

_RELOAD_PAUSE_S = 1.0  # between attempts to read invalid files, however many peers connect

logger = logging.getLogger("rt.net")


def server_credentials(tls: TLS) -> grpc.ServerCredentials:
    """Mutual TLS with the current files at each handshake.

    Raises `rt.CertificateError` if they are invalid now.
    """
    material = ReloadingCredentials(tls)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        before = material.present
        with contextlib.suppress(Exception):  # gRPC's native code calls this and cannot handle an exception
            material.refresh()
        return None if material.present is before else _configuration(material.present)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(material.present),
        fetch,  # type: ignore[arg-type]  # None: as before
        require_client_authentication=True,
    )


def _configuration(of: CertFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(of.key, of.cert)], root_certificates=of.ca)


class ReloadingCredentials:
    """The current, or else the last valid, credentials. Any thread may call `refresh`."""

    def __init__(self, tls: TLS) -> None:
        self.present = tls.load()
        self._tls = tls
        self._failed_at: float | None = None

    def refresh(self) -> CertFiles:
        """Check the files; return the credentials to use. Logs invalid files once."""
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
