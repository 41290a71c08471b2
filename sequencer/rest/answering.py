"""Who asks, what for, and what comes back: the one policy behind every way in.

Laws. Nobody gets past a certificate of another stream, or of a role that the path is not for. What reads has
no body; what changes something has one of JSON, of bounded length, and is asked with a certificate. So many
requests are answered at a time, in all and for each identity; more are told to come again. What goes wrong is
told as JSON by its class and sentence; what is broken here goes to the log alone.
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
from sequencer.rest.actions import Acting, Action
from sequencer.rest.asking import Answer, Asked
from sequencer.rest.body import parse_body
from sequencer.rest.endpoints import HTML, Endpoint
from sequencer.rest.errors import BadRequest, MethodNotAllowed, NoSuchPath, WrongMediaType
from sequencer.rest.exchange import JSON, Reply, Request, error_reply, json_bytes, split_target
from sequencer.rest.node_view import NodeView
from sequencer.rest.operations import Operations
from sequencer.rest.query import parse_query

REQUESTS_MAX: Final = 32
REQUESTS_PER_IDENTITY_MAX: Final = 8

_PAGE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; form-action 'none'"
)

logger = logging.getLogger("sequencer")


class Answering:
    """The answers of one port. With `stream`, callers show certificates, of that stream.

    Without `operations` nothing can be changed, whatever `actions` there are.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        look: Callable[[], NodeView],
        pool: Executor,
        *,
        stream: str | None,
        actions: Sequence[Action] = (),
        operations: Operations | None = None,
    ) -> None:
        assert stream is not None or not actions, "who may change something shows a certificate"
        self.statuses: Final = Counter[int]()
        """Answers by HTTP status."""
        self.refused: Final = Counter[str]()
        """Errors that were told, by class."""
        self.busy: Final = Counter[str]()
        """Requests that are being answered, by the identity's URI ("" without certificates)."""
        self._look, self._pool, self._stream, self._operations = look, pool, stream, operations
        self._paths: dict[str, dict[str, Endpoint | Action]] = {}
        for endpoint in endpoints:
            self._paths.setdefault(endpoint.path, {}).update({"GET": endpoint, "HEAD": endpoint})
        for action in actions:
            self._paths.setdefault(action.path, {})["POST"] = action

    @property
    def routes(self) -> set[tuple[str, str]]:
        """Each method and path that is answered."""
        return {(method, path) for path, methods in self._paths.items() for method in methods}

    async def answer(self, request: Request, identity: Identity | None) -> Reply:
        """Answer it; whatever is wrong becomes a reply too."""
        try:
            reply = await self._answer(request, identity)
        except RtError as error:
            return self.refuse(error)
        except Exception as error:
            logger.critical("rest_broken path=%r", request.target[:200], exc_info=error)
            reply = error_reply(RtError("the answer could not be made", hint="See the node's log."))
        self.statuses[reply.status] += 1
        return reply

    def refuse(self, error: RtError) -> Reply:
        """The reply that tells an error."""
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
            raise BadRequest("a request has no body here", where=path, wanted="none")
        query = parse_query(pairs, found.parameters)
        with _place(self.busy, identity):
            return await self._read(found, Asked(self._look(), identity, query))

    async def _read(self, endpoint: Endpoint, asked: Asked) -> Reply:
        if endpoint.may_be_large:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, _reply, endpoint, asked)
        return _reply(endpoint, asked)

    async def _act(self, action: Action, body: Mapping[str, object], identity: Identity | None) -> Reply:
        assert identity is not None
        assert self._operations is not None
        # What the fields took in is well-formed, and short: it can stand in a line of the log.
        logger.info("rest_asked path=%s by=%s body=%s", action.path, identity.uri, json.dumps(body))
        try:
            answer = await action.run(Acting(self._look, identity, body, self._operations))
        except RtError as error:
            logger.warning("rest_refused path=%s by=%s error=%r", action.path, identity.uri, str(error))
            raise
        logger.info("rest_done path=%s by=%s status=%d", action.path, identity.uri, answer.status)
        return Reply(answer.status, _content(answer))

    def _find(self, method: str, path: str) -> Endpoint | Action:
        methods = self._paths.get(path)
        if methods is None:
            raise NoSuchPath("nothing is there", where=repr(path)[:200], wanted=", ".join(self._paths))
        found = methods.get(method)
        if found is None:
            allowed = ", ".join(sorted(methods))
            raise MethodNotAllowed(
                "the path is there for another method", where=path, got=method[:40], wanted=allowed
            )
        return found

    def _check_stream(self, identity: Identity | None) -> None:
        """`rt.CertificateError` unless who asks is of this stream."""
        if self._stream is None:
            return
        if identity is None:
            raise CertificateError("the peer showed no certificate")
        if identity.stream != self._stream:
            raise CertificateError("a certificate of another stream", got=identity.uri, wanted=self._stream)


@contextlib.contextmanager
def _place(busy: Counter[str], identity: Identity | None) -> Iterator[None]:
    """One of the places for requests that are being answered; `rt.Overloaded` if all are taken."""
    who = "" if identity is None else identity.uri
    most = REQUESTS_MAX if identity is None else REQUESTS_PER_IDENTITY_MAX
    if busy.total() >= REQUESTS_MAX or busy[who] >= most:
        raise Overloaded("too many requests at once", where=who or None, hint="Try again in a second.")
    busy[who] += 1
    try:
        yield
    finally:
        busy[who] -= 1
        if not busy[who]:
            del busy[who]


def check_role(found: Endpoint | Action, identity: Identity | None) -> None:
    """`rt.CertificateError` unless the path is for that role; for None (no certificates) it is public."""
    if identity is None:
        assert isinstance(found, Endpoint), found.path
        assert found.is_public, found.path
    elif identity.role not in found.roles:
        raise CertificateError(
            "this role may not read that" if isinstance(found, Endpoint) else "this role may not do that",
            where=found.path,
            got=identity.uri,
            wanted=f"role {' or '.join(sorted(found.roles))}",
        )


async def _body(request: Request) -> bytes:
    """The bytes of a body that is said to be JSON."""
    if request.body is None:
        raise BadRequest("the body is missing", where="body", wanted="a JSON object")
    kind = request.content_type.partition(";")[0].strip().lower()
    if kind != JSON:
        raise WrongMediaType(
            "the body is not said to be JSON",
            where="header Content-Type",
            got=repr(request.content_type)[:200],
            wanted=JSON,
        )
    return await request.body()


def _reply(endpoint: Endpoint, asked: Asked) -> Reply:
    """In any thread."""
    answer = endpoint.view(asked)
    headers = {}
    if endpoint.content_type == HTML:
        headers["Content-Security-Policy"] = endpoint.policy or _PAGE_POLICY
    return Reply(answer.status, _content(answer), endpoint.content_type, headers)


def _content(answer: Answer) -> bytes:
    return answer.body.encode() if isinstance(answer.body, str) else json_bytes(answer.body)
