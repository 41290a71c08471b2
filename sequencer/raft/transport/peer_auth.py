"""Which peers may connect, and the TLS contexts that check them.

Invariants:
- A peer is a node of this stream, by its certificate. It is checked again whenever the connection is
  replaced.
- Invalid certificate files never replace valid credentials.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from rt.endpoints import parse_endpoint
from rt.errors import CertificateError
from rt.names import check_name
from rt.net.cert_files import CertFiles
from rt.net.identity import Identity
from rt.net.tls import TLS
from sequencer.raft.model.messages import Message
from sequencer.raft.transport.codec import encode

LOG_PAUSE_S: Final = 1.0
"""Rejections with the same reason are logged at most once in this time. All are counted."""

logger = logging.getLogger("sequencer.raft")


class PeerLost(Exception):
    """The connection ended, or must end. `reason` is one word, for counting."""

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class PeerRejected(PeerLost):
    """The peer did something that no member of this cluster does."""


class RejectionCounts:
    """Counts rejections, and logs each reason at most once in `LOG_PAUSE_S`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._log_again_s: dict[str, float] = {}

    def record(self, refused: PeerRejected, address: str, now_s: float) -> None:
        self.counts[refused.reason] += 1
        if now_s >= self._log_again_s.get(refused.reason, 0.0):
            self._log_again_s[refused.reason] = now_s + LOG_PAUSE_S
            detail = str(refused.detail)[:300]
            logger.warning(
                "connection_refused reason=%s address=%s detail=%r", refused.reason, address, detail
            )


class LoadedTls(NamedTuple):
    credentials: CertFiles
    server: ssl.SSLContext
    """For accepted connections."""
    client: ssl.SSLContext
    """For dialled connections."""


class TlsContexts:
    """The TLS contexts for new connections, reloaded when the files change.

    If the new files are invalid, the old contexts stay in use, and the error is logged once. Loading may wait
    for a rotation to finish, so it has its own thread.
    """

    due_s = 0.0
    """When to call `refresh`, by the caller's clock."""

    def __init__(self, tls: TLS, *, reload_s: float) -> None:
        self._tls = tls
        self._reload_s = reload_s
        self.loaded = self._load()
        self._loading: threading.Thread | None = None
        self._trouble = ""

    def refresh(self, now_s: float) -> None:
        """Check, at most every `reload_s` seconds, whether the files have changed."""
        if now_s < self.due_s:
            return
        self.due_s = now_s + self._reload_s
        is_loading = self._loading is not None and self._loading.is_alive()
        if not is_loading and self._tls.changed(self.loaded.credentials):
            self._loading = threading.Thread(target=self._reload, name="raft certificates", daemon=True)
            self._loading.start()

    def close(self) -> None:
        """Wait for the thread, which needs at most half a second."""
        if self._loading is not None:
            self._loading.join()

    def _load(self) -> LoadedTls:
        # Load the credentials first. If the contexts are newer than the credentials, this only causes one
        # more reload.
        return LoadedTls(self._tls.load(), self._tls.ssl_server_context(), self._tls.ssl_client_context())

    def _reload(self) -> None:
        try:
            self.loaded = self._load()
        except (CertificateError, OSError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.error("certificates_not_reloaded error=%r", self._trouble)
        else:
            self._trouble = ""
            credentials = self.loaded.credentials
            logger.info(
                "certificates_reloaded fingerprint=%s not_after=%s",
                credentials.fingerprint,
                credentials.not_after.isoformat(),
            )


class MeshMembers:
    """The members that a node talks to, and the members that it dials: by default only members with lesser
    names.
    """

    notice: Message | None = None
    """The last message to a node that is no member. None: it gets nothing."""

    def __init__(self, name: str, addresses: Mapping[str, str]) -> None:
        self._name = name
        self.addresses = dict(addresses)
        self.is_dialling_all = False

    @property
    def dialled(self) -> dict[str, str]:
        is_all = self.is_dialling_all
        others = ((peer, address) for peer, address in self.addresses.items() if peer != self._name)
        return {peer: address for peer, address in others if is_all or peer < self._name}

    def replace(self, addresses: Mapping[str, str]) -> set[str]:
        """Replace the members. Return the members whose connections must end, because they are no members now
        or have moved.
        """
        before, self.addresses = self.addresses, dict(addresses)
        return {
            peer
            for peer, address in before.items()
            if peer not in addresses or (address and address != addresses[peer])
        }

    def check(self, identity: Identity, own: Identity, *, dialled: str | None) -> PeerRejected | None:
        """Like `check_peer`, but return the rejection if the peer gets the notice. The peer gets it if the
        only problem is that it is no member.
        """
        try:
            check_peer(identity, own=own, members=self.addresses, dialled=dialled)
        except PeerRejected as refused:
            is_unlisted = identity.name not in self.addresses and identity.name != own.name
            if refused.reason != "member" or self.notice is None or not is_unlisted:
                raise
            return refused
        return None

    def notice_frame(self, epoch: int) -> bytes:
        assert self.notice is not None
        return b"".join(encode(self.notice, epoch))


def check_own(identity: Identity, name: str, members: Mapping[str, str]) -> None:
    """Raises `rt.CertificateError` unless `identity` is that of node `name`, ValueError for
    invalid members.
    """
    for member, address in members.items():
        check_name(member, kind="member").encode("idna")  # It is a host name in the certificate.
        parse_endpoint(address, where=f"member {member}")
    if name not in members:
        raise ValueError(f"name {name!r:.200} is not in members {sorted(members)}")
    if identity.role != "node" or identity.name != name:
        raise CertificateError(
            "the certificate belongs to another member",
            got=identity.uri,
            expected=f"rt://{identity.stream}/node/{name}",
            hint="Issue one with `rt certs issue`.",
        )


def check_peer(identity: Identity, *, own: Identity, members: Collection[str], dialled: str | None) -> None:
    """Raise `PeerRejected` unless `own` may talk to `identity` on such a connection. Pure.

    In each pair of members, the member with the greater name dials, so that there is one connection.
    """
    if identity.stream != own.stream:
        raise PeerRejected("stream", f"{identity.uri}, expected one of {own.stream}")
    if identity.role != "node":
        raise PeerRejected("role", f"{identity.uri}, expected a node")
    if identity.name not in members or identity.name == own.name:
        raise PeerRejected("member", f"{identity.uri}, expected another member")
    if dialled is not None and identity.name != dialled:
        raise PeerRejected("name", f"{identity.uri}, expected {dialled}")
    if dialled is None and identity.name < own.name:
        raise PeerRejected("direction", f"{own.name} dials {identity.uri}, never the other way round")
