"""The settings of `rt.connect`: nodes, stream, certificates and directory, given once for all clients.

    rt://HOST:PORT,HOST:PORT/STREAM?tls_dir=DIR&path=DIR
    rt://HOST:PORT/STREAM?ca=FILE&cert=FILE&key=FILE

Sources, the strongest first: arguments, the URL, `RT_*` variables, `RT_URL`, a profile in
`~/.config/rt/config.toml` (`$XDG_CONFIG_HOME/rt/config.toml`). That file has a table for each profile.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote

from msgspec import Struct

from rt.endpoints import split_endpoints
from rt.errors import CertificateError, InvalidName, InvalidOption
from rt.names import check_name
from rt.option_checks import read_settings

if TYPE_CHECKING:
    from rt.net.identity import Role
    from rt.net.tls import TLS

PROFILE: Final = "default"
_SCHEME: Final = "rt://"
_URL_FORM: Final = "rt://HOST:PORT,HOST:PORT/STREAM?tls_dir=DIR"
_FILES: Final = ("ca", "cert", "key")
_NAMED_BY: Final[Mapping[Role, str]] = {
    "publisher": "`client.publisher(NAME)`, or `rt pub --name NAME`",
    "subscriber": "`client.subscriber(NAME)`, or `rt sub --name NAME`",
}
PATHS: Final = ("path", "tls_dir", *_FILES)
_KEYS: Final = ("endpoints", "stream", *PATHS)


class CertificateSource(Struct, frozen=True):
    """The location of certificates: `tls_dir`, or one certificate in `ca`, `cert` and `key`. Absolute
    paths.
    """

    tls_dir: str | None = None
    """Directory with `ca.crt`, and `NAME.crt` and `NAME.key` for each publisher and subscriber."""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def missing(self) -> list[str]:
        """The settings that are missing for a certificate."""
        return [] if self.tls_dir else [name for name in _FILES if not getattr(self, name)]

    def find(self, role: Role, name: str | None = None) -> TLS:
        """The certificate of this role: the certificate of `name`, or the only one if no name is given.

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
                hint=_name_hint(self.tls_dir, role),
            )
        if not found:
            raise CertificateError(
                f"no certificate has the role {role}",
                where=self.tls_dir,
                hint=f"`rt certs issue {self.tls_dir} --role {role}` makes one.",
            )
        return found[0]


def _name_hint(tls_dir: str, role: Role) -> str:
    ca, cert, key = (os.path.join(tls_dir, file) for file in ("ca.crt", "NAME.crt", "NAME.key"))
    files = f"`--ca {ca} --cert {cert} --key {key}`"
    if role not in _NAMED_BY:
        return f"Name one: {files}."
    return f"Name one: {_NAMED_BY[role]}. For other commands: {files}."


class ConnectionSettings(Struct, frozen=True):
    """Checked settings of a client."""

    endpoints: tuple[str, ...]
    stream: str
    path: str
    """Directory for the logs of this host's publishers and the copies of its subscribers. Absolute."""
    certificates: CertificateSource


def subscriber_root(path: str, name: str) -> str:
    """The root of a subscriber's copy. Each name has its own copy, because nodes hold the log for only one
    name per copy.
    """
    return os.path.join(path, "subscribers", check_name(name, kind="subscriber"))


def default_path(environment: Mapping[str, str]) -> str:
    """The value of `path` if no source gives it."""
    return os.path.join(environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "rt")


def merge_sources(
    environment: Mapping[str, str],
    url: str | None = None,
    profile: str | None = None,
    given: Mapping[str, str | None] | None = None,
) -> dict[str, str]:
    """The settings of all sources; keys are `endpoints`, `stream`, `path`, `tls_dir`, `ca`, `cert`, `key`.

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
        # A directory and files are not mixed: the stronger source hides the other kind.
        hidden = _FILES if "tls_dir" in merged else ("tls_dir",) if merged.keys() & set(_FILES) else ()
        for key, value in layer.checked().items():
            if key not in hidden:
                merged.setdefault(key, value)
    return merged


class _Layer(Struct, frozen=True):
    where: str
    values: Mapping[str, str]
    base: str = ""
    """The directory where relative paths start; "" is the working directory."""

    def checked(self) -> dict[str, str]:
        if "tls_dir" in self.values and (both := sorted(self.values.keys() & set(_FILES))):
            raise InvalidOption(
                "tls_dir excludes ca, cert and key", where=self.where, got=", ".join(("tls_dir", *both))
            )
        if "endpoints" in self.values:
            split_endpoints(self.values["endpoints"], where=f"endpoints of {self.where}")
        for key, value in self.values.items():
            where = f"{key} of {self.where}"
            if "\0" in value:
                raise InvalidOption("a zero byte in a setting", where=where, got=repr(value)[:200])
            if key in PATHS and not value:  # As a path it would be the working directory.
                raise InvalidOption("the path is empty", where=where)
        return {
            key: os.path.abspath(os.path.join(self.base, os.path.expanduser(value)))
            if key in PATHS
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
        if key not in PATHS or key in found:
            what = "the URL has a setting twice" if key in found else "the URL has an unknown setting"
            raise InvalidOption(what, got=repr(key)[:200], expected=", ".join(PATHS))
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
            profiles = tomllib.loads(read_settings(file, is_regular=True))
    except (OSError, ValueError) as error:
        got = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = "Fix the file, or move it away."
        raise InvalidOption("the file of profiles cannot be read", where=file, got=got, hint=hint) from error
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
