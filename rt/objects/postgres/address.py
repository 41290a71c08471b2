"""The address of a store's server. Invariant: no error, log line or `repr` has a password of the URL."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field  # noqa: TID251
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from rt.errors import InvalidOption

SCHEMES: Final = ("postgresql://", "postgres://")
_SECRETS: Final = ("password", "sslpassword", "oauth_client_secret")
_SCHEMA: Final = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")
_LOCAL: Final = re.compile(r"localhost|127(\.\d+){3}|::1|[/@].*|")
_LIVENESS: Final = {
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
"""A connection whose peer has vanished is detected within seconds. The URL may set other values."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """How to connect. `label` names the server, the database and the schema, for errors."""

    label: str
    parameters: Mapping[str, str] = field(repr=False)

    def redact(self, text: str) -> str:
        """The text without the secrets of the URL."""
        for secret in filter(None, map(self.parameters.get, _SECRETS)):
            text = text.replace(secret, "***")
        return text


def is_url(store: str | os.PathLike[str]) -> bool:
    """Whether this names a store on a server, and not a file."""
    return isinstance(store, str) and store.startswith(SCHEMES)


def parse_url(url: str, schema: str, connect_timeout_s: float) -> ServerAddress:
    """The address in a URL `postgresql://[user[:password]@][host][:port]/database[?option=value&...]`.

    Unless the URL or the environment says otherwise, a server on another machine must prove who it is:
    `sslmode=verify-full`. Raises `rt.InvalidOption`.
    """
    check_schema(schema)
    if not is_url(url):
        raise InvalidOption(
            "not the URL of a PostgreSQL server", where="url", expected="postgresql://user@host/database"
        )
    given = _parameters(url)
    found = {**_LIVENESS, "connect_timeout": str(math.ceil(connect_timeout_s)), **given}
    if _is_remote(given) and "sslmode" not in given and "PGSSLMODE" not in os.environ:
        found["sslmode"] = "verify-full"
    found["application_name"] = application_name(schema)
    return ServerAddress(_label(given, schema), found)


def _parameters(url: str) -> dict[str, str]:
    """The parameters in the URL. The error is not chained, because psycopg's error contains the URL."""
    with contextlib.suppress(psycopg.Error):
        return {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    hint = "Percent-encode special characters in its parts."
    raise InvalidOption("the URL of the store is not valid", where="url", hint=hint)


def application_name(schema: str) -> str:
    """The name of a program's connections on the server, which has room for 63 bytes."""
    return f"rt store {schema}"[:63]


def check_schema(schema: str) -> None:
    """`rt.InvalidOption` unless the name needs no quotes in SQL."""
    if not _SCHEMA.fullmatch(schema):
        expected = "up to 63 of a-z, 0-9 and _, not beginning with a digit or pg_"
        raise InvalidOption("not a name of a schema", where="schema", got=repr(schema), expected=expected)


def _is_remote(given: Mapping[str, str]) -> bool:
    if "service" in given or "PGSERVICE" in os.environ:
        return False  # The service file says how to connect.
    hosts = given.get("hostaddr") or given.get("host") or os.environ.get("PGHOST", "")
    return not all(_LOCAL.fullmatch(host) for host in hosts.split(","))


def _label(given: Mapping[str, str], schema: str) -> str:
    user = f"{given['user']}@" if "user" in given else ""
    port = f":{given['port']}" if "port" in given else ""
    host = given.get("host") or given.get("hostaddr", "")
    return f"postgresql://{user}{host}{port}/{given.get('dbname', '')}, schema {schema}"
