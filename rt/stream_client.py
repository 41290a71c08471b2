"""`rt.connect` and `rt.Client`: the publishers, subscribers and groups of one stream.

Modules of the clients load when a client is made: a program that publishes loads nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from rt.client.connection import (
    PATHS,
    ConnectionSettings,
    build_settings,
    merge_sources,
    subscriber_root,
)
from rt.endpoints import check_endpoints
from rt.names import check_name, check_session_name, session_owner
from rt.option_checks import check_path

if TYPE_CHECKING:
    import rt.aio
    from rt.client.publisher import Publisher
    from rt.client.replication_problem import ErrorHandler
    from rt.client.settings import FsyncPolicy
    from rt.client.subscriber import Subscriber
    from rt.log.read.reader import EventHandler, Place
    from rt.sidecar.pull_settings import Retention
    from rt.streams.group.group import Group
    from rt.streams.group.options import GroupOptions

StrPath = str | os.PathLike[str]


class PublisherOptions(TypedDict, total=False):
    """The options of `rt.Publisher` and `rt.aio.Publisher`, besides nodes, names and certificates."""

    dedup_id: str | None
    batch_bytes: int
    linger_ms: float
    roll_bytes: int
    fsync: FsyncPolicy
    compression: Literal["zstd"] | None
    local_persistence: float
    max_silence: float | None
    on_merged: Callable[[int], None] | None
    on_error: ErrorHandler | None


class SubscriberOptions(TypedDict, total=False):
    """The options of `rt.Subscriber`, besides nodes, names and certificates."""

    position: Place | None
    topics: Collection[str] | None
    on_event: EventHandler | None
    retention: Retention
    connect_timeout: float | None


class Client:
    """Makes the publishers and subscribers of one stream. Holds no connection: each of them has its own."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings

    def publisher(self, name: str | None = None, **options: Unpack[PublisherOptions]) -> Publisher:
        """An `rt.Publisher` whose session is `name`, in `<path>/<stream>/sessions/<name>`.

        `name` may be `NAME~SUFFIX`, with the certificate of NAME. None: the only publisher's certificate
        names it.
        """
        from rt.client.publisher import Publisher

        return Publisher(self.settings.path, self.settings.stream, **self._session(name), **options)

    def async_publisher(
        self, name: str | None = None, **options: Unpack[PublisherOptions]
    ) -> rt.aio.Publisher:
        """The same as an `rt.aio.Publisher`."""
        from rt.aio import Publisher

        return Publisher(self.settings.path, self.settings.stream, **self._session(name), **options)

    def subscriber(self, name: str | None = None, **options: Unpack[SubscriberOptions]) -> Subscriber:
        """An `rt.Subscriber` of that name. Its copy is in `<path>/subscribers/<name>`.

        None: the only subscriber's certificate names it.
        """
        from rt.client.subscriber import Subscriber

        return Subscriber(stream=self.settings.stream, **self._copy(name), **options)

    def async_subscriber(
        self, name: str | None = None, **options: Unpack[SubscriberOptions]
    ) -> rt.aio.Subscriber:
        """The same as an `rt.aio.Subscriber`."""
        from rt.aio import Subscriber

        return Subscriber(stream=self.settings.stream, **self._copy(name), **options)

    def group(self, name: str | None = None, options: GroupOptions | None = None) -> Group:
        """A member of group `name`, which shares the messages of the stream with the other members.

        Its copy is in `<path>/groups/<name>`, for all members on this machine. None: the only subscriber's
        certificate names it.
        """
        from rt.streams.group.group import Group

        settings = self.settings
        tls = settings.certificates.find("subscriber", name)
        name = check_name(tls.identity.name if name is None else name, kind="group")
        root = os.path.join(settings.path, "groups", name)
        return Group(root, settings.stream, name, endpoints=settings.endpoints, tls=tls, options=options)

    def _session(self, name: str | None) -> dict[str, Any]:
        """The arguments for a publisher: the name of its session, nodes, its certificate."""
        owner = None if name is None else session_owner(check_session_name(name))
        tls = self.settings.certificates.find("publisher", owner)
        session = tls.identity.name if name is None else name
        return {"publisher_id": session, "endpoints": self.settings.endpoints, "tls": tls}

    def _copy(self, name: str | None) -> dict[str, Any]:
        """The arguments for a subscriber: the root of its copy, its name, nodes, its certificate."""
        tls = self.settings.certificates.find("subscriber", name)
        name = tls.identity.name if name is None else name
        root = subscriber_root(self.settings.path, name)
        return {"path": root, "name": name, "endpoints": self.settings.endpoints, "tls": tls}


def connect(
    url: str | None = None,
    *,
    profile: str | None = None,
    endpoints: Sequence[str] | str | None = None,
    stream: str | None = None,
    path: StrPath | None = None,
    tls_dir: StrPath | None = None,
    ca: StrPath | None = None,
    cert: StrPath | None = None,
    key: StrPath | None = None,
) -> Client:
    """The client of a stream. Reads settings only; no node is asked.

    `url` is `rt://HOST:PORT,HOST:PORT/STREAM?tls_dir=DIR&path=DIR`; instead of `tls_dir` it may have `ca`,
    `cert` and `key`. What neither `url` nor an argument says is taken from `RT_ENDPOINTS`, `RT_STREAM`,
    `RT_PATH`, `RT_TLS_DIR`, `RT_CA`, `RT_CERT` and `RT_KEY`, then from `RT_URL`, then from the profile
    (default: `RT_PROFILE`, else "default") in `~/.config/rt/config.toml`.

    `path` holds the logs of this host. Default: `~/.local/state/rt`.

    Raises `rt.InvalidOption` for a setting that is missing, unknown or malformed, `rt.InvalidName` for a
    malformed stream.
    """
    if not isinstance(endpoints, str | None):
        endpoints = ",".join(check_endpoints(endpoints, where="endpoints of arguments", is_required=True))
    given = {
        "endpoints": endpoints,
        "stream": None if stream is None else check_name(stream, kind="stream"),
        **{
            name: None if value is None else check_path(value, name=f"{name} of arguments")
            for name, value in zip(PATHS, (path, tls_dir, ca, cert, key), strict=True)
        },
    }
    return Client(build_settings(merge_sources(os.environ, url, profile, given), os.environ))
