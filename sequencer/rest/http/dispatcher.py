"""Authorizes, limits and answers requests: the one policy of the REST port, health port and gRPC tunnel.

Invariants:
- A certificate of another stream, or of a role that the path does not name, is rejected.
- A read has no body. An action needs a certificate and a JSON body of limited length.
- Concurrent requests are limited, in total and per identity; further ones get 503.
- A response describes an `RtError` by class and text. Internal errors go only to the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

from rt.errors import CertificateError, Overloaded, RtError
from rt.net.identity import Identity
from sequencer.rest.base.admin_ports import AdminPorts
from sequencer.rest.base.errors import BadRequest, MethodNotAllowed, NoSuchPath, WrongMediaType
from sequencer.rest.base.fields import parse_body, parse_query
from sequencer.rest.base.node_snapshot import NodeSnapshot
from sequencer.rest.base.request import JSON, Reply, Request, error_reply, json_bytes, split_target
from sequencer.rest.page import PAGE_FILES
from sequencer.rest.views.context import Action, ActionContext, RequestContext, Response
from sequencer.rest.views.endpoints import HTML, RestEndpoint

REQUESTS_MAX: Final = 32
REQUESTS_PER_IDENTITY_MAX: Final = 8

_PAGE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; form-action 'none'"
)

logger = logging.getLogger("sequencer")


class Dispatcher:
    """The routes of one port. `stream`: callers need a certificate of this stream; None: no certificates.

    `actions` need `operations`.
    """

    def __init__(
        self,
        endpoints: Sequence[RestEndpoint],
        snapshot: Callable[[], NodeSnapshot],
        pool: Executor,
        *,
        stream: str | None,
        actions: Sequence[Action] = (),
        operations: AdminPorts | None = None,
    ) -> None:
        assert stream is not None or not actions, "actions need certificates"
        self.statuses: Final = Counter[int]()
        """Responses by HTTP status."""
        self.refused: Final = Counter[str]()
        """Errors in responses, by class."""
        self.busy: Final = Counter[str]()
        """Running requests by identity URI ("" without certificates)."""
        self._snapshot, self._pool, self._stream, self._operations = snapshot, pool, stream, operations
        self._paths: dict[str, dict[str, RestEndpoint | Action]] = {}
        for endpoint in endpoints:
            self._paths.setdefault(endpoint.path, {}).update({"GET": endpoint, "HEAD": endpoint})
        for action in actions:
            self._paths.setdefault(action.path, {})["POST"] = action

    @property
    def routes(self) -> set[tuple[str, str]]:
        return {(method, path) for path, methods in self._paths.items() for method in methods}

    async def answer(self, request: Request, identity: Identity | None) -> Reply:
        """Answer the request; errors become replies."""
        try:
            reply = await self._answer(request, identity)
        except RtError as error:
            return self.refuse(error)
        except Exception as error:
            logger.critical("rest_failed path=%r", request.target[:200], exc_info=error)
            reply = error_reply(RtError("internal error", hint="Check the node's log."))
        self.statuses[reply.status] += 1
        return reply

    def refuse(self, error: RtError) -> Reply:
        """The reply for an error, counted."""
        self.refused[type(error).__name__] += 1
        reply = error_reply(error)
        self.statuses[reply.status] += 1
        return reply

    async def _answer(self, request: Request, identity: Identity | None) -> Reply:
        self._check_stream(identity)
        path, pairs = split_target(request.target)
        found = self._find(request.method, path)
        check_role(found, identity)
        if isinstance(found, Action):
            parse_query(pairs, ())
            body = parse_body(await _body(request), found.fields)
            with _place(self.busy, identity):
                return await self._act(found, body, identity)
        if request.body is not None:
            raise BadRequest("this path accepts no request body", where=path, expected="none")
        query = parse_query(pairs, found.parameters)
        with _place(self.busy, identity):
            return await self._read(found, RequestContext(self._snapshot(), identity, query))

    async def _read(self, endpoint: RestEndpoint, asked: RequestContext) -> Reply:
        if endpoint.may_be_large:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, _reply, endpoint, asked)
        return _reply(endpoint, asked)

    async def _act(self, action: Action, body: Mapping[str, object], identity: Identity | None) -> Reply:
        assert identity is not None
        assert self._operations is not None
        # The parsed body is well-formed and short, so it is safe to log.
        logger.info("rest_request path=%s by=%s body=%s", action.path, identity.uri, json.dumps(body))
        try:
            answer = await action.run(ActionContext(self._snapshot, identity, body, self._operations))
        except RtError as error:
            logger.warning("rest_rejected path=%s by=%s error=%r", action.path, identity.uri, str(error))
            raise
        logger.info("rest_completed path=%s by=%s status=%d", action.path, identity.uri, answer.status)
        return Reply(answer.status, _content(answer))

    def _find(self, method: str, path: str) -> RestEndpoint | Action:
        methods = self._paths.get(path)
        if methods is None:
            raise NoSuchPath("unknown path", where=repr(path)[:200], expected=", ".join(self._named()))
        found = methods.get(method)
        if found is None:
            allowed = ", ".join(sorted(methods))
            raise MethodNotAllowed(
                "the path does not support this method", where=path, got=method[:40], expected=allowed
            )
        return found

    def _named(self) -> Iterator[str]:
        """The paths of the interface, without the files of its status page."""
        pages = {file.path for file in PAGE_FILES}
        return (path for path in self._paths if path not in pages)

    def _check_stream(self, identity: Identity | None) -> None:
        """Raises `rt.CertificateError` for a certificate of another stream."""
        if self._stream is None:
            return
        if identity is None:
            raise CertificateError("the client presented no certificate")
        if identity.stream != self._stream:
            raise CertificateError(
                "the client certificate is of another stream", got=identity.uri, expected=self._stream
            )


@contextlib.contextmanager
def _place(busy: Counter[str], identity: Identity | None) -> Iterator[None]:
    """Count a running request. Raises `rt.Overloaded` at a limit."""
    caller = "" if identity is None else identity.uri
    most = REQUESTS_MAX if identity is None else REQUESTS_PER_IDENTITY_MAX
    if busy.total() >= REQUESTS_MAX or busy[caller] >= most:
        raise Overloaded("too many concurrent requests", where=caller or None, hint="Retry in a second.")
    busy[caller] += 1
    try:
        yield
    finally:
        busy[caller] -= 1
        if not busy[caller]:
            del busy[caller]


def check_role(found: RestEndpoint | Action, identity: Identity | None) -> None:
    """Raises `rt.CertificateError` unless the role may use the path. If `identity` is None, the path must be
    public.
    """
    if identity is None:
        assert isinstance(found, RestEndpoint), found.path
        assert found.is_public, found.path
    elif identity.role not in found.roles:
        raise CertificateError(
            "this role may not read this path"
            if isinstance(found, RestEndpoint)
            else "this role may not run this action",
            where=found.path,
            got=identity.uri,
            expected=f"role {' or '.join(sorted(found.roles))}",
        )


async def _body(request: Request) -> bytes:
    """Raises `BadRequest` without a body, `WrongMediaType` unless it is JSON."""
    if request.body is None:
        raise BadRequest("the body is missing", where="body", expected="a JSON object")
    kind = request.content_type.partition(";")[0].strip().lower()
    if kind != JSON:
        raise WrongMediaType(
            "the Content-Type is not JSON",
            where="header Content-Type",
            got=repr(request.content_type)[:200],
            expected=JSON,
        )
    return await request.body()


def _reply(endpoint: RestEndpoint, asked: RequestContext) -> Reply:
    answer = endpoint.view(asked)
    headers = {}
    if endpoint.content_type == HTML:
        headers["Content-Security-Policy"] = endpoint.policy or _PAGE_POLICY
    return Reply(answer.status, _content(answer), endpoint.content_type, headers)


def _content(answer: Response) -> bytes:
    return answer.body.encode() if isinstance(answer.body, str) else json_bytes(answer.body)
