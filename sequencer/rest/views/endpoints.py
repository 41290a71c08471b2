"""The read endpoints: the only list from which routes and OpenAPI are made.

Invariants:
- A path that is neither here nor in `admin_actions` does not exist.
- A role that an endpoint does not name gets no answer.
- Endpoints only read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from msgspec import Struct

from rt.exposition import CONTENT_TYPE
from rt.net.identity import ROLES, Role
from sequencer.rest.base.fields import LIMIT, OFFSET, Field, bound, choice, flag, name_of, session_of
from sequencer.rest.base.request import JSON
from sequencer.rest.page import PAGE_FILES, POLICY, PageFile
from sequencer.rest.views.admin_actions import ACTIONS
from sequencer.rest.views.admin_views import (
    ConfigurationReport,
    HoldReport,
    LeaseReport,
    LeaseTableReport,
    ResetReport,
    configuration,
    holds,
    lease_tables,
    leases,
    reset_status,
)
from sequencer.rest.views.client_views import (
    ClientReport,
    ClusterClients,
    DedupReport,
    SessionReport,
    clients,
    cluster_clients,
    dedup_clients,
    sessions,
)
from sequencer.rest.views.cluster_views import Liveness, Readiness, StatusReport, liveness, readiness, status
from sequencer.rest.views.context import RequestContext, Response
from sequencer.rest.views.log_history import (
    LatestOutPosition,
    MergedSegmentReport,
    MergedSegmentState,
    latest_out_position,
    log_history,
)
from sequencer.rest.views.node_metrics import metrics
from sequencer.rest.views.openapi import docs_page, document

View: TypeAlias = Callable[[RequestContext], Response]
HTML: Final = "text/html; charset=utf-8"
OPERATORS: Final[frozenset[Role]] = frozenset({"operator"})
EVERYBODY: Final[frozenset[Role]] = frozenset(ROLES)


class RestEndpoint(Struct, frozen=True):
    """One path, read with GET or HEAD."""

    path: str
    summary: str
    view: View
    answer: Any
    """The type of the body."""
    roles: frozenset[Role] = OPERATORS
    parameters: tuple[Field, ...] = ()
    content_type: str = JSON
    may_be_503: bool = False
    """Whether the 503 response has the same type; otherwise it is an error."""
    is_public: bool = False
    """Whether the path is also on the port without certificates."""
    may_be_large: bool = False
    """The view runs in the thread pool, not in the event loop."""
    policy: str = ""
    """Content-Security-Policy of a page. Empty: the policy of a page without scripts."""


def _openapi(_: RequestContext) -> Response:
    return Response(document(ENDPOINTS, ACTIONS))


def _docs(_: RequestContext) -> Response:
    return Response(docs_page(ENDPOINTS, ACTIONS))


def _page_file(file: PageFile) -> RestEndpoint:
    return RestEndpoint(
        file.path,
        file.summary,
        lambda _: Response(file.text),
        str,
        content_type=file.content_type,
        policy=POLICY,
    )


ENDPOINTS: Final[tuple[RestEndpoint, ...]] = (
    RestEndpoint(
        "/log-history",
        "Merged segments, oldest first, trimmed ones included. The same on every node.",
        log_history,
        list[MergedSegmentReport],
        EVERYBODY,
        (
            bound("from", "Only segments with data at or after this position or time."),
            bound("to", "Only segments with data before this position or time."),
            choice("state", "Only segments in this state.", MergedSegmentState),
            LIMIT,
            OFFSET,
        ),
        may_be_large=True,
    ),
    RestEndpoint(
        "/latest-out-position",
        "Position of the last merged message.",
        latest_out_position,
        LatestOutPosition,
        EVERYBODY,
    ),
    RestEndpoint("/status", "Status of the cluster and of this node.", status, StatusReport),
    RestEndpoint(
        "/sessions",
        "Sessions of publishers that the cluster knows.",
        sessions,
        list[SessionReport],
        parameters=(
            session_of("name", "Only incarnations of this session.", is_required=False),
            LIMIT,
            OFFSET,
        ),
        may_be_large=True,
    ),
    RestEndpoint(
        "/rt-clients",
        "Publishers and subscribers of this node; ended connections are listed for 24 hours. "
        "Callers other than operators see their own.",
        clients,
        list[ClientReport],
        EVERYBODY,
        (
            choice("kind", "Only clients with this role in their certificate.", Role),
            name_of("name", "Only clients with this name in their certificate.", "client", is_required=False),
            flag("active", "true: only connected clients. false: only ended connections."),
            LIMIT,
            OFFSET,
        ),
        may_be_large=True,
    ),
    RestEndpoint(
        "/cluster-clients",
        "Publishers and subscribers of all nodes, and the node that each is connected to.",
        cluster_clients,
        ClusterClients,
        may_be_large=True,
    ),
    RestEndpoint(
        "/dedup-rt-clients",
        "Sessions by shared dedup id, with the next message id to merge. "
        "Callers other than operators see their own.",
        dedup_clients,
        list[DedupReport],
        EVERYBODY,
        (session_of("name", "Only this dedup id.", is_required=False), LIMIT, OFFSET),
        may_be_large=True,
    ),
    RestEndpoint(
        "/holds",
        "Holds of named subscribers. Callers other than operators see their own.",
        holds,
        list[HoldReport],
        EVERYBODY,
        may_be_large=True,
    ),
    RestEndpoint(
        "/leases",
        "Held leases and their owners.",
        leases,
        list[LeaseReport],
        parameters=(LIMIT, OFFSET),
        may_be_large=True,
    ),
    RestEndpoint(
        "/lease-tables",
        "Tables that the owners of leases keep in the cluster.",
        lease_tables,
        list[LeaseTableReport],
        parameters=(LIMIT, OFFSET),
        may_be_large=True,
    ),
    RestEndpoint("/configuration", "The replicated configuration.", configuration, ConfigurationReport),
    RestEndpoint(
        "/reset-status",
        "State of the last reset; 503 while it runs.",
        reset_status,
        ResetReport,
        may_be_503=True,
    ),
    RestEndpoint(
        "/readiness",
        "200 if this node leads or follows with a majority, merges, and lags little.",
        readiness,
        Readiness,
        EVERYBODY,
        may_be_503=True,
        is_public=True,
    ),
    RestEndpoint(
        "/liveness",
        "200 while the processes of this node work.",
        liveness,
        Liveness,
        EVERYBODY,
        may_be_503=True,
        is_public=True,
    ),
    RestEndpoint(
        "/metrics",
        "Metrics for Prometheus.",
        metrics,
        str,
        content_type=CONTENT_TYPE,
        is_public=True,
        may_be_large=True,
    ),
    RestEndpoint("/openapi.json", "This API as OpenAPI 3.1.", _openapi, dict[str, Any]),
    RestEndpoint("/docs", "This API as a page.", _docs, str, content_type=HTML),
    *map(_page_file, PAGE_FILES),
)
