"""What is answered, to whom, and how it is described: the one list that routes and OpenAPI are made of.

Pure. Laws: a path that is not here, and in `actions`, is answered by nobody, and a role that is not named
here gets nothing. Every answer is made by reading; nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from rt.net.identity import ROLES, Role
from sequencer.rest import operating_schemas, schemas
from sequencer.rest.actions import ACTIONS
from sequencer.rest.asking import Answer, Asked
from sequencer.rest.exchange import JSON
from sequencer.rest.exposition import CONTENT_TYPE
from sequencer.rest.log_history import STATES
from sequencer.rest.metrics import metrics
from sequencer.rest.openapi import docs_page, document
from sequencer.rest.operating_views import configuration, dedup_clients, holds, leases, reset_status
from sequencer.rest.page import PAGE_FILES, POLICY, PageFile
from sequencer.rest.query import (
    LIMIT,
    OFFSET,
    Parameter,
    bound,
    certificate_name,
    choice,
    session_name,
    truth,
)
from sequencer.rest.schema_kinds import Schema, text
from sequencer.rest.views import (
    clients,
    latest_out_position,
    liveness,
    log_history,
    readiness,
    sessions,
    status,
)

View: TypeAlias = Callable[[Asked], Answer]
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
    policy: str = ""
    """The Content-Security-Policy of a page; empty: that of a page without scripts."""


def _openapi(_: Asked) -> Answer:
    return Answer(document(ENDPOINTS, ACTIONS))


def _docs(_: Asked) -> Answer:
    return Answer(docs_page(ENDPOINTS, ACTIONS))


def _page_file(file: PageFile) -> Endpoint:
    return Endpoint(
        file.path,
        file.summary,
        lambda _: Answer(file.text),
        text("A file of the status page."),
        content_type=file.content_type,
        policy=POLICY,
    )


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
        (
            choice("kind", "Those with a certificate of that role.", ROLES),
            certificate_name("name", "Those with a certificate of that name."),
            truth("active", "true: those that are connected; false: those that ended."),
            LIMIT,
            OFFSET,
        ),
        may_be_large=True,
    ),
    Endpoint(
        "/dedup-rt-clients",
        "Publishers by the dedup id that they share, and the next id that is merged. Who is no operator gets "
        "its own.",
        dedup_clients,
        operating_schemas.DEDUP_CLIENTS,
        EVERYBODY,
        (session_name("name", "That dedup id."), LIMIT, OFFSET),
        may_be_large=True,
    ),
    Endpoint(
        "/holds",
        "What is held back for named subscribers. Who is no operator gets its own.",
        holds,
        operating_schemas.HOLDS,
        EVERYBODY,
        may_be_large=True,
    ),
    Endpoint(
        "/leases",
        "Who holds which lease.",
        leases,
        operating_schemas.LEASES,
        parameters=(LIMIT, OFFSET),
        may_be_large=True,
    ),
    Endpoint("/configuration", "What commands change.", configuration, operating_schemas.CONFIGURATION),
    Endpoint(
        "/reset-status",
        "How the last reset stands; 503 while it runs.",
        reset_status,
        operating_schemas.RESET_STATUS,
        may_be_503=True,
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
        text("Prometheus text format."),
        content_type=CONTENT_TYPE,
        is_public=True,
        may_be_large=True,
    ),
    Endpoint("/openapi.json", "This description, for programs.", _openapi, {"type": "object"}),
    Endpoint(
        "/docs",
        "This description, for people.",
        _docs,
        text("A page."),
        content_type=HTML,
    ),
    *map(_page_file, PAGE_FILES),
)
