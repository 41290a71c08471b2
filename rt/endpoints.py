"""Endpoints of nodes: "host:port", with an IPv6 host in brackets. The only parser of them. Pure.

gRPC itself accepts nearly any text as a target: it takes another port, or a name that no resolver knows, and
never connects. So every option that takes endpoints checks them here.

Invariant: `str` of an endpoint parses to the same endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Final, NamedTuple

from rt.errors import InvalidOption

PORT_MAX: Final = 65535
_FORM: Final = '"host:port", as "n1.example:5002" or "[::1]:5002"'
_SHOWN_CHARACTERS: Final = 200
_HOST_CHARACTERS_MAX: Final = 253
_LABEL: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


class Endpoint(NamedTuple):
    """A host name, or an address without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, *, where: str | None = None) -> Endpoint:
    """The endpoint; `rt.InvalidOption`, which names the option `where`, if it is malformed."""
    if not isinstance(text, str):
        raise InvalidOption("an endpoint is not a text", where=where, got=repr(text)[:200], expected=_FORM)
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if "://" in text:
        problem = "an endpoint has no scheme"
    elif not colon or (":" in host and not is_bracketed):
        problem = "the port is missing"
        if text.count(":") > 1 and "]" not in text:
            problem += ", or an IPv6 address is not in brackets"
    elif not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= PORT_MAX):
        problem = f"the port is not a number from 1 to {PORT_MAX}"
    elif not (_is_ipv6(host[1:-1]) if is_bracketed else _is_name_or_ipv4(host)):
        problem = "the host is not a name or an address"
    else:
        return Endpoint(host[1:-1] if is_bracketed else host, int(port))
    raise InvalidOption(problem, where=where, got=repr(text)[:_SHOWN_CHARACTERS], expected=_FORM)


def check_endpoints(
    endpoints: Sequence[str], *, where: str = "endpoints", is_required: bool = False
) -> tuple[str, ...]:
    """The endpoints, each as `str(Endpoint)`.

    Raises `rt.InvalidOption` if one is malformed or named twice, if a single text is given instead of a
    sequence, or if there is none although `is_required`.
    """
    if isinstance(endpoints, str | bytes) or not isinstance(endpoints, Iterable):
        raise InvalidOption(
            "the endpoints are not a sequence of texts",
            where=where,
            got=repr(endpoints)[:_SHOWN_CHARACTERS],
            expected="a sequence of 'host:port'",
        )
    found = tuple(str(parse_endpoint(text, where=where)) for text in endpoints)
    for index, endpoint in enumerate(found):
        if endpoint in found[:index]:
            raise InvalidOption("an endpoint is named twice", where=where, got=endpoint)
    if is_required and not found:
        raise InvalidOption("no endpoint is named", where=where, expected=f"at least one {_FORM}")
    return found


def split_endpoints(text: str, *, where: str = "endpoints") -> tuple[str, ...]:
    """The endpoints in a text that separates them by commas, at least one; raises as `check_endpoints`."""
    return check_endpoints(
        [part for part in map(str.strip, text.split(",")) if part], where=where, is_required=True
    )


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True


def _is_name_or_ipv4(host: str) -> bool:
    labels = host.removesuffix(".").split(".")
    if len(host) > _HOST_CHARACTERS_MAX or not all(map(_LABEL.fullmatch, labels)):
        return False
    if not labels[-1].isdecimal():
        return True
    try:  # No name ends with a number: RFC 1123, section 2.1.
        IPv4Address(host)
    except ValueError:
        return False
    return True
