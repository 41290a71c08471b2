"""What is answered, to whom, and how it is described: the one list that routes and OpenAPI are made of.

Pure. Laws: a path that is not here is answered by nobody, and a role that is not named here gets nothing.
Every answer is made by reading; nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from rt.net.identity import ROLES, Role
from sequencer.rest import schemas
from sequencer.rest.log_history import STATES
from sequencer.rest.metrics import CONTENT_TYPE, metrics
from sequencer.rest.openapi import docs_page, document
from sequencer.rest.query import LIMIT, OFFSET, Parameter, bound, choice, session_name
from sequencer.rest.schemas import Schema
from sequencer.rest.views import (
    Answer,
    Asked,
    clients,
    latest_out_position,
    liveness,
    log_history,
    readiness,
    sessions,
    status,
)

View: TypeAlias = Callable[[Asked], Answer]
JSON: Final = "application/json"
HTML: Final = "text/html; charset=utf-8"
OPERATORS: Final[frozenset[Role]] = frozenset({"operator"})
EVERYBODY: Final[frozenset[Role]] = frozenset(ROLES)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path, read with GET or HEAD."""

    path: str
    summary: str
    view: View
    schema: Schema
    roles: frozenset[Role] = OPERATORS
    parameters: tuple[Parameter, ...] = ()
    content_type: str = JSON
    may_be_503: bool = False
    """A 503 has the same schema; otherwise it is an error."""
    is_public: bool = False
    """Also on the port without certificates."""
    may_be_large: bool = False
    """It is made beside the event loop."""


def _openapi(_: Asked) -> Answer:
    return Answer(document(ENDPOINTS))


def _docs(_: Asked) -> Answer:
    return Answer(docs_page(ENDPOINTS))


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        "/log-history",
        "The merged segments, trimmed ones included, oldest first. The same on every node.",
        log_history,
        schemas.LOG_HISTORY,
        EVERYBODY,
        (
            bound("from", "Segments with anything at or behind that position or time."),
            bound("to", "Segments with anything before that position or time."),
            choice("state", "Segments in that state.", STATES),
            LIMIT,
            OFFSET,
        ),
        may_be_large=True,
    ),
    Endpoint(
        "/latest-out-position",
        "The position of the last message that is merged.",
        latest_out_position,
        schemas.LATEST_OUT_POSITION,
        EVERYBODY,
    ),
    Endpoint("/status", "The cluster, and the node that answers.", status, schemas.STATUS),
    Endpoint(
        "/sessions",
        "The publishers' sessions that the cluster knows.",
        sessions,
        schemas.SESSIONS,
        parameters=(session_name("name", "Incarnations of that session."), LIMIT, OFFSET),
        may_be_large=True,
    ),
    Endpoint(
        "/rt-clients",
        "Publishers and subscribers of this node; those that ended are kept 24 hours. Who is no operator "
        "gets what is its own.",
        clients,
        schemas.CLIENTS,
        EVERYBODY,
        may_be_large=True,
    ),
    Endpoint(
        "/readiness",
        "200 if this node follows or leads with a majority, merges, and is not far behind.",
        readiness,
        schemas.READINESS,
        EVERYBODY,
        may_be_503=True,
        is_public=True,
    ),
    Endpoint(
        "/liveness",
        "200 as long as the data process works.",
        liveness,
        schemas.LIVENESS,
        EVERYBODY,
        may_be_503=True,
        is_public=True,
    ),
    Endpoint(
        "/metrics",
        "What Prometheus scrapes.",
        metrics,
        schemas.text("Prometheus text format."),
        content_type=CONTENT_TYPE,
        is_public=True,
        may_be_large=True,
    ),
    Endpoint("/openapi.json", "This description, for programs.", _openapi, {"type": "object"}),
    Endpoint(
        "/docs",
        "This description, for people.",
        _docs,
        schemas.text("A page."),
        content_type=HTML,
    ),
)
