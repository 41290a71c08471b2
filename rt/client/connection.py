"""`rt.connect`: nodes, stream, certificates and directory of a program, said once for all its clients.

    rt://HOST:PORT,HOST:PORT/STREAM?tls_dir=DIR&path=DIR
    rt://HOST:PORT/STREAM?ca=FILE&cert=FILE&key=FILE

Sources, the strongest first: arguments, the URL, `RT_*` variables, `RT_URL`, a profile in
`~/.config/rt/config.toml` (`$XDG_CONFIG_HOME/rt/config.toml`), which is a table for each profile.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack
from urllib.parse import parse_qsl, unquote

from rt.endpoints import split_endpoints
from rt.errors import CertificateError, InvalidName, InvalidOption
from rt.names import check_name, check_session_name, session_owner

if TYPE_CHECKING:
    import rt.aio
    from rt.client.publisher import Publisher
    from rt.client.replication_problem import ErrorHandler
    from rt.client.settings import FsyncPolicy
    from rt.client.subscriber import Subscriber
    from rt.log.read.reader import EventHandler, Place
    from rt.net.identity import Role
    from rt.net.tls import TLS
    from rt.sidecar.pull_settings import Retention
    from rt.streams.group.group import Group
    from rt.streams.group.options import GroupOptions

StrPath = str | os.PathLike[str]

PROFILE: Final = "default"
_SCHEME: Final = "rt://"
_URL_FORM: Final = "rt://HOST:PORT,HOST:PORT/STREAM?tls_dir=DIR"
_FILES: Final = ("ca", "cert", "key")
_PATHS: Final = ("path", "tls_dir", *_FILES)
_KEYS: Final = ("endpoints", "stream", *_PATHS)


class PublisherOptions(TypedDict, total=False):
    """What `rt.Publisher` takes besides nodes, names and certificates."""

    dedup_id: str | None
    batch_bytes: int
    linger_ms: float
    roll_bytes: int
    fsync: FsyncPolicy
    compression: Literal["zstd"] | None
    local_persistence: float
    on_error: ErrorHandler | None


class AsyncPublisherOptions(PublisherOptions, total=False):
    """What `rt.aio.Publisher` takes besides nodes, names and certificates."""

    on_merged: Callable[[int], None] | None


class SubscriberOptions(TypedDict, total=False):
    """What `rt.Subscriber` takes besides nodes, names and certificates."""

    position: Place | None
    topics: Collection[str] | None
    on_event: EventHandler | None
    retention: Retention
    connect_timeout: float | None


@dataclass(frozen=True, slots=True)
class CertificateSource:
    """Where certificates are: in `tls_dir`, or one in `ca`, `cert` and `key`. Absolute paths."""

    tls_dir: str | None = None
    """Directory with `ca.crt`, and `NAME.crt` and `NAME.key` for each publisher and subscriber."""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def missing(self) -> list[str]:
        """The settings without which there is no certificate."""
        return [] if self.tls_dir else [name for name in _FILES if not getattr(self, name)]

    def find(self, role: Role, name: str | None = None) -> TLS:
        """The certificate of this role: that of `name`, or the only one there is.

        Raises `rt.CertificateError` if there is none, `rt.InvalidOption` if there are several.
        """
        from rt.net.tls import TLS

        if self.tls_dir is None:
            return TLS(*(str(getattr(self, file)) for file in _FILES))
        if name is not None:
            tls = TLS.from_directory(self.tls_dir, name)
            if tls.identity.role != role:
                raise CertificateError(
                    "the certificate has another role",
                    where=os.fspath(tls.cert),
                    got=tls.identity.uri,
                    expected=f"role {role}",
                    hint=f"`rt certs issue {self.tls_dir} --role {role}` makes one, with another name.",
                )
            return tls
        found = list(_certificates(self.tls_dir, role))
        if len(found) > 1:
            raise InvalidOption(
                f"several certificates have the role {role}",
                where=self.tls_dir,
                got=", ".join(sorted(one.identity.name for one in found)),
                expected="a name",
            )
        if not found:
            raise CertificateError(
                f"no certificate has the role {role}",
                where=self.tls_dir,
                hint=f"`rt certs issue {self.tls_dir} --role {role}` makes one.",
            )
        return found[0]


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Checked settings of a client."""

    endpoints: tuple[str, ...]
    stream: str
    path: str
    """Directory for the logs of this host's publishers and the copies of its subscribers. Absolute."""
    certificates: CertificateSource


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

        session, tls = self._session(name)
        settings = self.settings
        return Publisher(
            settings.path,
            settings.stream,
            publisher_id=session,
            endpoints=settings.endpoints,
            tls=tls,
            **options,
        )

    def async_publisher(
        self, name: str | None = None, **options: Unpack[AsyncPublisherOptions]
    ) -> rt.aio.Publisher:
        """The same as an `rt.aio.Publisher`."""
        from rt.aio import Publisher

        session, tls = self._session(name)
        settings = self.settings
        return Publisher(
            settings.path,
            settings.stream,
            publisher_id=session,
            endpoints=settings.endpoints,
            tls=tls,
            **options,
        )

    def subscriber(self, name: str | None = None, **options: Unpack[SubscriberOptions]) -> Subscriber:
        """An `rt.Subscriber` of that name. Its copy is in `<path>/subscribers/<name>`.

        None: the only subscriber's certificate names it.
        """
        from rt.client.subscriber import Subscriber

        root, name, tls = self._copy(name)
        settings = self.settings
        return Subscriber(root, settings.stream, name=name, endpoints=settings.endpoints, tls=tls, **options)

    def async_subscriber(
        self, name: str | None = None, **options: Unpack[SubscriberOptions]
    ) -> rt.aio.Subscriber:
        """The same as an `rt.aio.Subscriber`."""
        from rt.aio import Subscriber

        root, name, tls = self._copy(name)
        settings = self.settings
        return Subscriber(root, settings.stream, name=name, endpoints=settings.endpoints, tls=tls, **options)

    def group(self, name: str | None = None, options: GroupOptions | None = None) -> Group:
        """A member of group `name`, which shares the messages of the stream with the other members.

        Its copy is in `<path>/groups/<name>`, for all members on this machine. None: the only subscriber's
        certificate names it.
        """
        settings = self.settings
        tls = settings.certificates.find("subscriber", name)
        name = check_name(tls.identity.name if name is None else name, kind="group")
        member: type[Group] = import_module("rt.streams.group.group").Group  # A layer above this one.
        root = os.path.join(settings.path, "groups", name)
        return member(root, settings.stream, name, endpoints=settings.endpoints, tls=tls, options=options)

    def _session(self, name: str | None) -> tuple[str, TLS]:
        """Name of a publisher's session, its certificate."""
        owner = None if name is None else session_owner(check_session_name(name))
        tls = self.settings.certificates.find("publisher", owner)
        return tls.identity.name if name is None else name, tls

    def _copy(self, name: str | None) -> tuple[str, str, TLS]:
        """Root of a subscriber's copy, its name, its certificate."""
        tls = self.settings.certificates.find("subscriber", name)
        name = tls.identity.name if name is None else name
        return subscriber_root(self.settings.path, name), name, tls


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
    given = {
        "endpoints": endpoints if isinstance(endpoints, str) or endpoints is None else ",".join(endpoints),
        "stream": stream,
        **{
            name: None if value is None else os.fspath(value)
            for name, value in zip(_PATHS, (path, tls_dir, ca, cert, key), strict=True)
        },
    }
    return Client(build_settings(merge_sources(os.environ, url, profile, given), os.environ))


def subscriber_root(path: str, name: str) -> str:
    """The root of a subscriber's copy. Each name has its own: nodes hold the log for one name a copy."""
    return os.path.join(path, "subscribers", check_name(name, kind="subscriber"))


def default_path(environment: Mapping[str, str]) -> str:
    """`path` if no source says it."""
    return os.path.join(environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "rt")


def merge_sources(
    environment: Mapping[str, str],
    url: str | None = None,
    profile: str | None = None,
    given: Mapping[str, str | None] | None = None,
) -> dict[str, str]:
    """What the sources say; keys are `endpoints`, `stream`, `path`, `tls_dir`, `ca`, `cert`, `key`.

    Raises `rt.InvalidOption`, which names the source that is wrong.
    """
    layers = [
        _Layer("arguments", {key: value for key, value in (given or {}).items() if value is not None}),
        *([] if url is None else [_Layer("the URL", parse_url(url))]),
        _Layer("environment", {key: value for key in _KEYS if (value := environment.get(_variable(key)))}),
        *([_Layer("RT_URL", parse_url(text))] if (text := environment.get("RT_URL")) else []),
        *_profile(environment, profile or environment.get("RT_PROFILE")),
    ]
    merged: dict[str, str] = {}
    for layer in layers:
        # A directory and files are not mixed: what is stronger hides the other kind.
        hidden = _FILES if "tls_dir" in merged else ("tls_dir",) if merged.keys() & set(_FILES) else ()
        for key, value in layer.checked().items():
            if key not in hidden:
                merged.setdefault(key, value)
    return merged


@dataclass(frozen=True, slots=True)
class _Layer:
    where: str
    values: Mapping[str, str]
    base: str = ""
    """Where relative paths start; "": the working directory."""

    def checked(self) -> dict[str, str]:
        if "tls_dir" in self.values and (both := sorted(self.values.keys() & set(_FILES))):
            raise InvalidOption(
                "tls_dir excludes ca, cert and key", where=self.where, got=", ".join(("tls_dir", *both))
            )
        if "endpoints" in self.values:
            split_endpoints(self.values["endpoints"], where=f"endpoints of {self.where}")
        return {
            key: os.path.abspath(os.path.join(self.base, os.path.expanduser(value)))
            if key in _PATHS
            else value
            for key, value in self.values.items()
        }


def parse_url(url: str) -> dict[str, str]:
    """The settings in a URL, as text. `rt.InvalidOption` if it is malformed."""
    if not str(url).startswith(_SCHEME):
        raise InvalidOption("not a URL of rt", got=repr(url)[:200], expected=_URL_FORM)
    place, _, query = url[len(_SCHEME) :].partition("?")
    endpoints, _, stream = place.partition("/")
    found = {"endpoints": unquote(endpoints), "stream": unquote(stream)}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise InvalidOption(
            "the part of the URL after '?' is malformed",
            got=repr(query)[:200],
            expected="KEY=VALUE&KEY=VALUE",
        ) from error
    for key, value in pairs:
        if key not in _PATHS or key in found:
            what = "the URL has a setting twice" if key in found else "the URL has an unknown setting"
            raise InvalidOption(what, got=repr(key)[:200], expected=", ".join(_PATHS))
        found[key] = value
    return {key: value for key, value in found.items() if value}


def profile_file(environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home, "rt", "config.toml")


def _profile(environment: Mapping[str, str], name: str | None) -> Iterator[_Layer]:
    """The settings of a profile; none if the file or the default profile does not exist."""
    file = profile_file(environment)
    profiles: dict[str, Any] = {}
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            profiles = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidOption("the file of profiles cannot be read", where=file, got=str(error)) from error
    values = profiles.get(name or PROFILE)
    if values is None:
        if name is None:
            return
        known = ", ".join(sorted(profiles)) or "none"
        raise InvalidOption("no such profile", where=file, got=repr(name)[:200], expected=known)
    where = f"{file} [{name or PROFILE}]"
    if not isinstance(values, dict):
        raise InvalidOption("a profile is a table", where=where, got=repr(values)[:200])
    yield _Layer(where, {key: _text(key, value, where) for key, value in values.items()}, str(file.parent))


def _text(key: str, value: object, where: str) -> str:
    if key not in _KEYS:
        raise InvalidOption("unknown setting", where=where, got=repr(key)[:200], expected=", ".join(_KEYS))
    if key == "endpoints" and isinstance(value, list):
        return ",".join(map(str, value))
    if not isinstance(value, str):
        raise InvalidOption("the setting is not a text", where=f"{where} {key}", got=repr(value)[:200])
    return value


def _variable(key: str) -> str:
    return f"RT_{key.upper()}"


def build_settings(merged: Mapping[str, str], environment: Mapping[str, str]) -> ConnectionSettings:
    """Check what `merge_sources` found. `rt.InvalidOption` if something is missing."""
    for key in ("endpoints", "stream"):
        if key not in merged:
            raise InvalidOption(f"no {key} given", expected=_help(key, environment))
    certificates = certificate_source(merged)
    if missing := certificates.missing:
        raise InvalidOption(
            "no certificate given",
            got=f"without {', '.join(missing)}",
            expected=_help("tls_dir", environment),
        )
    return ConnectionSettings(
        endpoints=split_endpoints(merged["endpoints"]),
        stream=check_name(merged["stream"], kind="stream"),
        path=merged.get("path") or default_path(environment),
        certificates=certificates,
    )


def certificate_source(merged: Mapping[str, str]) -> CertificateSource:
    return CertificateSource(*(merged.get(key) for key in ("tls_dir", *_FILES)))


def _help(key: str, environment: Mapping[str, str]) -> str:
    return f"{key} in a URL ({_URL_FORM}), {_variable(key)}, or {profile_file(environment)}"


def _certificates(directory: str, role: Role) -> Iterator[TLS]:
    """The valid certificates of a role in `tls_dir`."""
    from rt.net.tls import TLS

    for file in sorted(Path(directory).glob("*.crt")):
        with suppress(CertificateError, InvalidName):
            tls = TLS.from_directory(directory, file.stem)
            if tls.identity.role == role:
                yield tls
