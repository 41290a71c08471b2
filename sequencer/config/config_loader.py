"""Reads a node's settings. Options take precedence over `RT_*` variables, variables over a TOML file, and the
file over defaults.

Invariants:
- An error names the option, variable or key of a file that set the value. An unknown key is an error.
- A setting from a source with higher precedence completely replaces the setting from another source. This
  includes the members.

`RT_NODE_<KEY>` takes precedence over `RT_<KEY>`. Unknown variables are ignored: orchestrators set their own.
A relative path starts in the file's directory if the file sets it, else in the working directory.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from msgspec import Struct

from rt.endpoints import parse_endpoint
from rt.option_checks import read_settings
from rt.units import SIZE_END, SIZE_FORM, parse_size
from sequencer.config.config import (
    LOG_FORMATS,
    LOG_LEVELS,
    BadSetting,
    ClusterMember,
    NodeConfig,
    check_listen,
    check_member_name,
    check_members,
)

MEMBER_FORM: Final = "name=host:raft port,host:data port"
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_REQUIRED: Final = ("stream", "name", "directory", "members", "ca", "cert", "key")


class SettingSource(Struct, frozen=True):
    """A setting as one source gives it."""

    value: Any
    where: str
    """The option, the variable, or the file and key."""
    base: str
    """The directory in which a relative path starts."""
    is_text: bool
    """Whether numbers and booleans are written as text. A file has types of its own."""

    def bad(self, what: str, expected: str, hint: str | None = None) -> BadSetting:
        return BadSetting(what, where=self.where, got=repr(self.value)[:200], expected=expected, hint=hint)


Source = Mapping[str, SettingSource]


def node_config(flags: Mapping[str, Any], environment: Mapping[str, str], directory: str) -> NodeConfig:
    """The settings of a node. `BadSetting` names the error and where it was set.

    `flags`: the given options by key; `members` is a sequence of texts, `config` the path of a file.
    `directory`: the working directory.
    """
    settings = {**from_environment(environment, directory), **from_flags(flags, directory)}
    file = settings.pop("config", None)
    return build_config({**from_file(_path(file)), **settings} if file is not None else settings)


def given_values(flags: Mapping[str, Any], environment: Mapping[str, str], directory: str) -> dict[str, Any]:
    """The values of options and variables alone, by key. `BadSetting` as for `node_config`."""
    settings = {**from_environment(environment, directory), **from_flags(flags, directory)}
    return {key: KEYS[key](one) for key, one in settings.items() if key in KEYS}


def from_flags(flags: Mapping[str, Any], directory: str) -> dict[str, SettingSource]:
    settings = {}
    for key, value in flags.items():
        flag = "--member" if key == "members" else f"--{key.replace('_', '-')}"
        text = ";".join(value) if key == "members" else value
        settings[key] = SettingSource(text, flag, directory, isinstance(text, str))
    return settings


def from_environment(environment: Mapping[str, str], directory: str) -> dict[str, SettingSource]:
    """An empty variable counts as not set."""
    settings = {}
    for key in (*KEYS, "config"):
        for variable in (f"RT_NODE_{key.upper()}", f"RT_{key.upper()}"):
            if value := environment.get(variable):
                settings[key] = SettingSource(value, variable, directory, is_text=True)
                break
    return settings


def from_file(path: str) -> dict[str, SettingSource]:
    """`BadSetting` if the file cannot be read or contains an unknown key."""
    try:
        content = tomllib.loads(read_settings(path))
    except OSError as error:
        raise BadSetting("cannot read the settings file", where=path, got=error.strerror) from error
    except ValueError as error:  # TOMLDecodeError, and bytes that are no UTF-8.
        raise BadSetting("the settings file is not valid TOML", where=path, got=str(error)) from error
    _refuse_unknown(content, KEYS, path)
    base = os.path.dirname(path)
    return {
        key: SettingSource(value, f"{path}, key {key}", base, is_text=False) for key, value in content.items()
    }


def build_config(settings: Source) -> NodeConfig:
    """Parse the settings, and add defaults."""
    values = {key: KEYS[key](one) for key, one in settings.items()}
    if missing := [key for key in _REQUIRED if key not in settings]:
        raise BadSetting(
            f"{'a setting is' if len(missing) == 1 else 'settings are'} missing",
            where=", ".join(missing),
            hint="Give each as an option, as RT_<NAME> in the environment, or in the file of --config.",
        )
    own = values["members"].get(values["name"])
    if own is not None:
        values.setdefault("raft_port", parse_endpoint(own.raft).port)
        values.setdefault("data_port", parse_endpoint(own.data).port)
    try:
        return NodeConfig(**values)
    except BadSetting as error:
        if isinstance(error.where, str) and error.where in settings:
            error.where = settings[error.where].where
        raise


def _refuse_unknown(table: Mapping[str, Any], known: Mapping[str, Any] | tuple[str, ...], where: str) -> None:
    unknown = [key for key in table if key not in known]
    if unknown:
        got, expected = ", ".join(map(repr, unknown))[:200], ", ".join(known)
        raise BadSetting("unknown key", where=where, got=got, expected=f"one of {expected}")


@contextmanager
def _at(where: str) -> Iterator[None]:
    try:
        yield
    except BadSetting as error:
        error.where = where
        raise


def _text(setting: SettingSource) -> str:
    if not isinstance(setting.value, str):
        raise setting.bad("not a text", "a string")
    return setting.value


def _name(setting: SettingSource, kind: str) -> str:
    with _at(setting.where):
        return check_member_name(_text(setting), kind=kind)


def _path(setting: SettingSource) -> str:
    text = _text(setting)
    try:
        f"{setting.base}{text}".encode()
    except UnicodeEncodeError:
        raise BadSetting(
            "the path is not valid UTF-8",
            where=setting.where,
            hint="Rename the directory or file. A relative path starts in the working directory, or in that "
            "of the settings file.",
        ) from None
    if "-----BEGIN" in text or not text.isprintable():
        # Not shown: it may be a private key.
        raise BadSetting("not a path", where=setting.where, expected="the path of a file, not its content")
    if not text:
        raise setting.bad("the path is empty", "a path")
    return os.path.abspath(os.path.join(setting.base, text))


def _port(setting: SettingSource, least: int = 1) -> int:
    value = setting.value
    if setting.is_text and value.isascii() and value.isdecimal() and len(value) < 6:
        value = int(value)
    if type(value) is not int or not least <= value <= 65535:
        # Kubernetes sets RT_DATA_PORT=tcp://10.0.0.7:5002 for a service called rt-data.
        is_made_up = setting.is_text and setting.where.startswith("RT_") and "://" in setting.value
        hint = f"Kubernetes set it: set enableServiceLinks: false, or RT_NODE_{setting.where[3:]}."
        raise setting.bad(
            "invalid port",
            f"a whole number from {least} to 65535{'' if least else ', 0 for none'}",
            hint if is_made_up else None,
        )
    return value


def _number(setting: SettingSource, end: int) -> int:
    value = setting.value
    if setting.is_text and value.isascii() and value.isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not 0 <= value < end:
        raise setting.bad("invalid number", f"a whole number from 0 to {end - 1}")
    return value


def _size(setting: SettingSource, least: int) -> int:
    value = setting.value
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except ValueError:
            raise setting.bad("invalid size", SIZE_FORM) from None
    if type(value) is not int or not least <= value < SIZE_END:
        raise setting.bad("invalid size", SIZE_FORM)
    return value


def _truth(setting: SettingSource) -> bool:
    if isinstance(setting.value, bool):
        return setting.value
    word = setting.value.lower() if setting.is_text else None
    if word not in _TRUE | _FALSE:
        raise setting.bad("neither true nor false", "true or false")
    return word in _TRUE


def _one_of(setting: SettingSource, words: tuple[str, ...]) -> str:
    word = _text(setting).lower()
    if word not in words:
        raise setting.bad("unknown value", " or ".join(words))
    return word


def _listen(setting: SettingSource) -> str:
    with _at(setting.where):
        return check_listen(_text(setting))


def _members(setting: SettingSource) -> Mapping[str, ClusterMember]:
    members = dict(_spelled_members(setting) if setting.is_text else _table_of_members(setting))
    with _at(setting.where):
        check_members(members, is_whole=False)
    return members


def _spelled_members(setting: SettingSource) -> Iterator[tuple[str, ClusterMember]]:
    seen: set[str] = set()
    for text in filter(None, map(str.strip, setting.value.split(";"))):
        name, equals, addresses = text.partition("=")
        raft, comma, data = addresses.partition(",")
        if not (equals and comma):
            raise BadSetting(
                "invalid member", where=setting.where, got=repr(text)[:200], expected=MEMBER_FORM
            )
        if name in seen:
            raise BadSetting("a member is named twice", where=setting.where, got=repr(name)[:200])
        seen.add(name)
        yield _member(name, raft.strip(), data.strip(), setting.where)


def _table_of_members(setting: SettingSource) -> Iterator[tuple[str, ClusterMember]]:
    if not isinstance(setting.value, dict):
        raise setting.bad(
            "not a table of members", 'tables as [members.n1] with raft = "host:port", data = ...'
        )
    for name, table in setting.value.items():
        where = f"{setting.where}.{name}"
        if not isinstance(table, dict):
            raise BadSetting(
                "invalid member", where=where, got=repr(table)[:200], expected="a table of raft, data"
            )
        _refuse_unknown(table, ("raft", "data"), where)
        for key in ("raft", "data"):
            if not isinstance(table.get(key), str):
                got = repr(table.get(key))[:200]
                raise BadSetting("invalid address", where=f"{where}.{key}", got=got, expected='"host:port"')
        yield _member(name, table["raft"], table["data"], where)


def _member(name: str, raft: str, data: str, where: str) -> tuple[str, ClusterMember]:
    with _at(where):
        return check_member_name(name), ClusterMember(raft=raft, data=data)


KEYS: Final[Mapping[str, Callable[[SettingSource], Any]]] = {
    "stream": partial(_name, kind="stream"),
    "name": partial(_name, kind="node"),
    "directory": _path,
    "members": _members,
    "ca": _path,
    "cert": _path,
    "key": _path,
    "bootstrap": _truth,
    "listen": _listen,
    "data_port": _port,
    "raft_port": _port,
    "rest_port": partial(_port, least=0),
    "health_port": partial(_port, least=0),
    "log_level": partial(_one_of, words=LOG_LEVELS),
    "log_format": partial(_one_of, words=LOG_FORMATS),
    "roll_bytes": partial(_size, least=1),
    "roll_minutes": partial(_number, end=1 << 32),
    "retention_minutes": partial(_number, end=1 << 32),
    "retention_bytes": partial(_size, least=0),
    "retention_disk_percent": partial(_number, end=101),
    "hold_bytes_max": partial(_size, least=0),
}
"""Each setting and its parser."""
