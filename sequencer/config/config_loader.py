"""Where a node's settings come from: flags beat `RT_*` variables, they beat a TOML file, that beats defaults.

Law: whatever is wrong is refused with the very flag, variable or key of a file that said it, and a key that
nobody knows is an error. A setting that a stronger source gives replaces the weaker one whole, members too.

`RT_NODE_<KEY>` comes before `RT_<KEY>`. Variables beyond the known ones mean nothing: an orchestrator makes
up its own. A relative path starts in the file's directory, if a file says it, or in the working directory.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

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
    split_address,
)

MEMBER_FORM: Final = "name=host:raft port,host:data port"
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_REQUIRED: Final = ("stream", "name", "directory", "members", "ca", "cert", "key")


@dataclass(frozen=True, slots=True)
class SettingSource:
    """A setting as one source gives it."""

    value: Any
    where: str
    """The flag, the variable, or the file and key."""
    base: str
    """The directory in which a relative path starts."""
    is_text: bool
    """Whether numbers and truths are spelled in it; a file has types of its own."""

    def bad(self, what: str, wanted: str, hint: str | None = None) -> BadSetting:
        """The error that refuses it."""
        return BadSetting(what, where=self.where, got=repr(self.value)[:200], expected=wanted, hint=hint)


Source = Mapping[str, SettingSource]


def node_config(flags: Mapping[str, Any], environment: Mapping[str, str], directory: str) -> NodeConfig:
    """The settings of a node; `BadSetting` names what is wrong, and where it was said.

    `flags` are those that were given, by key, and `config`, the path of a file; `members` is a sequence of
    texts. `directory` is the working directory.
    """
    given = from_flags(flags, directory)
    told = from_environment(environment, directory)
    said = {**told, **given}
    file = said.pop("config", None)
    return settle({**from_file(_path(file)), **said} if file is not None else said)


def from_flags(flags: Mapping[str, Any], directory: str) -> dict[str, SettingSource]:
    """What the command line says."""
    said = {}
    for key, value in flags.items():
        flag = "--member" if key == "members" else f"--{key.replace('_', '-')}"
        text = ";".join(value) if key == "members" else value
        said[key] = SettingSource(text, flag, directory, isinstance(text, str))
    return said


def from_environment(environment: Mapping[str, str], directory: str) -> dict[str, SettingSource]:
    """What the variables say; an empty one says nothing."""
    said = {}
    for key in (*KEYS, "config"):
        for variable in (f"RT_NODE_{key.upper()}", f"RT_{key.upper()}"):
            if value := environment.get(variable):
                said[key] = SettingSource(value, variable, directory, is_text=True)
                break
    return said


def from_file(path: str) -> dict[str, SettingSource]:
    """What a TOML file says; `BadSetting` if it cannot be read or holds an unknown key."""
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise BadSetting("cannot read the settings", where=path, got=error.strerror) from error
    except ValueError as error:  # TOMLDecodeError, and bytes that are no UTF-8.
        raise BadSetting("the settings are no TOML", where=path, got=str(error)) from error
    _refuse_unknown(content, KEYS, path)
    base = os.path.dirname(path)
    return {
        key: SettingSource(value, f"{path}, key {key}", base, is_text=False) for key, value in content.items()
    }


def settle(said: Source) -> NodeConfig:
    """The settings that one set of sayings makes, defaults filled in."""
    values = {key: KEYS[key](one) for key, one in said.items()}
    if missing := [key for key in _REQUIRED if key not in said]:
        raise BadSetting(
            f"{'a setting is' if len(missing) == 1 else 'settings are'} missing",
            where=", ".join(missing),
            hint="Give each as a flag, as RT_<NAME> in the environment, or in the file of --config.",
        )
    own = values["members"].get(values["name"])
    if own is not None:
        values.setdefault("raft_port", split_address(own.raft)[1])
        values.setdefault("data_port", split_address(own.data)[1])
    try:
        return NodeConfig(**values)
    except BadSetting as error:
        if isinstance(error.where, str) and error.where in said:
            error.where = said[error.where].where
        raise


def _refuse_unknown(table: Mapping[str, Any], known: Mapping[str, Any] | tuple[str, ...], where: str) -> None:
    unknown = [key for key in table if key not in known]
    if unknown:
        got, wanted = ", ".join(map(repr, unknown))[:200], ", ".join(known)
        raise BadSetting("a key that nobody knows", where=where, got=got, expected=f"one of {wanted}")


@contextmanager
def _at(where: str) -> Iterator[None]:
    try:
        yield
    except BadSetting as error:
        error.where = where
        raise


def _text(said: SettingSource) -> str:
    if not isinstance(said.value, str):
        raise said.bad("no text", "a string")
    return said.value


def _name(kind: str) -> Callable[[SettingSource], str]:
    def name(said: SettingSource) -> str:
        with _at(said.where):
            return check_member_name(_text(said), kind=kind)

    return name


def _path(said: SettingSource) -> str:
    text = _text(said)
    if "-----BEGIN" in text or not text.isprintable():
        # Not shown: it may be a private key.
        raise BadSetting("no path", where=said.where, expected="the path of a file, not what is in it")
    if not text:
        raise said.bad("no path", "one that is not empty")
    return os.path.abspath(os.path.join(said.base, text))


def _port(said: SettingSource, least: int = 1) -> int:
    value = said.value
    if said.is_text and value.isascii() and value.isdecimal() and len(value) < 6:
        value = int(value)
    if type(value) is not int or not least <= value <= 65535:
        # As it does RT_DATA_PORT=tcp://10.0.0.7:5002 for a service called rt-data.
        is_made_up = said.is_text and said.where.startswith("RT_") and "://" in said.value
        hint = f"Kubernetes made it up: set enableServiceLinks: false, or RT_NODE_{said.where[3:]}."
        raise said.bad(
            "no port",
            f"a whole number from {least} to 65535{'' if least else ', 0 for none'}",
            hint if is_made_up else None,
        )
    return value


def _optional_port(said: SettingSource) -> int:
    return _port(said, least=0)


def _number(end: int) -> Callable[[SettingSource], int]:
    def number(said: SettingSource) -> int:
        value = said.value
        if said.is_text and value.isascii() and value.isdecimal() and len(value) < 20:
            value = int(value)
        if type(value) is not int or not 0 <= value < end:
            raise said.bad("no number that can be", f"a whole number from 0 to {end - 1}")
        return value

    return number


def _size(least: int) -> Callable[[SettingSource], int]:
    def size(said: SettingSource) -> int:
        value = said.value
        if isinstance(value, str):
            try:
                value = parse_size(value)
            except ValueError:
                raise said.bad("no size", SIZE_FORM) from None
        if type(value) is not int or not least <= value < SIZE_END:
            raise said.bad("no size", SIZE_FORM)
        return value

    return size


def _truth(said: SettingSource) -> bool:
    if isinstance(said.value, bool):
        return said.value
    word = said.value.lower() if said.is_text else None
    if word not in _TRUE | _FALSE:
        raise said.bad("neither true nor false", "true or false")
    return word in _TRUE


def _one_of(words: tuple[str, ...]) -> Callable[[SettingSource], str]:
    def one(said: SettingSource) -> str:
        word = _text(said).lower()
        if word not in words:
            raise said.bad("none of the choices", " or ".join(words))
        return word

    return one


def _listen(said: SettingSource) -> str:
    with _at(said.where):
        return check_listen(_text(said))


def _members(said: SettingSource) -> Mapping[str, ClusterMember]:
    members = dict(_spelled_members(said) if said.is_text else _table_of_members(said))
    with _at(said.where):
        check_members(members)
    return members


def _spelled_members(said: SettingSource) -> Iterator[tuple[str, ClusterMember]]:
    seen: set[str] = set()
    for text in filter(None, map(str.strip, said.value.split(";"))):
        name, equals, addresses = text.partition("=")
        raft, comma, data = addresses.partition(",")
        if not (equals and comma):
            raise BadSetting("no member", where=said.where, got=repr(text)[:200], expected=MEMBER_FORM)
        if name in seen:
            raise BadSetting("a member is named twice", where=said.where, got=repr(name)[:200])
        seen.add(name)
        yield _member(name, raft.strip(), data.strip(), said.where)


def _table_of_members(said: SettingSource) -> Iterator[tuple[str, ClusterMember]]:
    if not isinstance(said.value, dict):
        raise said.bad("no table of members", 'tables as [members.n1] with raft = "host:port", data = ...')
    for name, table in said.value.items():
        where = f"{said.where}.{name}"
        if not isinstance(table, dict):
            raise BadSetting(
                "no member", where=where, got=repr(table)[:200], expected="a table of raft, data"
            )
        _refuse_unknown(table, ("raft", "data"), where)
        for key in ("raft", "data"):
            if not isinstance(table.get(key), str):
                got = repr(table.get(key))[:200]
                raise BadSetting("no address", where=f"{where}.{key}", got=got, expected='"host:port"')
        yield _member(name, table["raft"], table["data"], where)


def _member(name: str, raft: str, data: str, where: str) -> tuple[str, ClusterMember]:
    with _at(where):
        return check_member_name(name), ClusterMember(raft=raft, data=data)


KEYS: Final[Mapping[str, Callable[[SettingSource], Any]]] = {
    "stream": _name("stream"),
    "name": _name("node"),
    "directory": _path,
    "members": _members,
    "ca": _path,
    "cert": _path,
    "key": _path,
    "bootstrap": _truth,
    "listen": _listen,
    "data_port": _port,
    "raft_port": _port,
    "rest_port": _optional_port,
    "health_port": _optional_port,
    "log_level": _one_of(LOG_LEVELS),
    "log_format": _one_of(LOG_FORMATS),
    "roll_bytes": _size(1),
    "roll_minutes": _number(1 << 32),
    "retention_minutes": _number(1 << 32),
    "retention_bytes": _size(0),
    "retention_disk_percent": _number(101),
    "hold_bytes_max": _size(0),
}
"""Each setting, and what makes its value of what a source says."""
