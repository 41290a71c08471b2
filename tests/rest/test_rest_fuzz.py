"""REST against its own OpenAPI description: generated valid and invalid requests, roles, and methods."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from receiving_node import make_pki
from rest_node import Served, history, serving
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
)

from sequencer.rest.base.admin_ports import ResetStatus
from sequencer.rest.views.admin_actions import ACTIONS
from sequencer.rest.views.endpoints import ENDPOINTS
from sequencer.state.state_codec import encode_state

EXAMPLES = 12
"""The number of valid and invalid examples for each operation."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    positive_data_acceptance,
]
OPERATIONS = [("GET", one.path) for one in ENDPOINTS] + [("POST", one.path) for one in ACTIONS]
VARIED = [("GET", one.path) for one in ENDPOINTS if one.parameters] + [("POST", one.path) for one in ACTIONS]
"""Those with anything to be varied."""

fuzzed = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Fuzzed:
    """A node that serves in a thread, its description, and sessions of clients."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.url = f"https://127.0.0.1:{served.rest_port}"
        self._sessions: dict[str, requests.Session] = {}
        self.schema: Any = schemathesis.openapi.from_dict(self.ask("GET", "/openapi.json").json())

    def options(self, name: str) -> dict[str, Any]:
        """The options of a request with this certificate."""
        if name not in self._sessions:
            self._sessions[name] = requests.Session()
            self._sessions[name].trust_env = False
        pki = self.served.pki
        return {
            "session": self._sessions[name],
            "verify": str(pki / "ca.crt"),
            "cert": (str(pki / f"{name}.crt"), str(pki / f"{name}.key")),
            "timeout": 30,
        }

    def send(self, case: Any, name: str = "op") -> Any:
        return case.call(base_url=self.url, **self.options(name))

    def ask(self, method: str, path: str) -> requests.Response:
        options = self.options("op")
        session: requests.Session = options.pop("session")
        return session.request(method, self.url + path, **options)

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    pki, directory = make_pki(tmp_path_factory.mktemp("pki")), tmp_path_factory.mktemp("node")
    ready: Future[tuple[Served, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=_serve, args=(pki, directory, ready))
    thread.start()
    served, loop, stop = ready.result(timeout=60)
    try:
        with contextlib.closing(Fuzzed(served)) as fuzzed:
            yield fuzzed
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=60)


def _serve(pki: Path, directory: Path, ready: Future[Any]) -> None:
    async def whole() -> None:
        async with serving(pki, directory) as served:
            stop = asyncio.Event()
            ready.set_result((served, asyncio.get_running_loop(), stop))
            await stop.wait()

    try:
        asyncio.run(whole())
    except BaseException as error:
        if not ready.done():
            ready.set_exception(error)
        raise


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
@pytest.mark.parametrize(("method", "path"), VARIED, ids=lambda part: part)
def test_operation_response_conforms_to_openapi_for_generated_requests(
    method: str, path: str, mode: GenerationMode, node: Fuzzed
) -> None:
    operation = node.schema[path][method]

    @fuzzed
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        node.served.data.follower.state = history()
        node.served.data.resets.now = ResetStatus()
        case.validate_response(node.send(case), checks=CHECKS)

    check()


@pytest.mark.parametrize("path", [one.path for one in ENDPOINTS if not one.parameters])
def test_endpoint_without_parameters_conforms_to_openapi(path: str, node: Fuzzed) -> None:
    node.served.data.follower.state = history()
    node.served.data.resets.now = ResetStatus()
    case = node.schema[path]["GET"].Case()

    case.validate_response(node.send(case), checks=CHECKS[:4])


@pytest.mark.parametrize("path", [one.path for one in ACTIONS])
def test_action_by_role_other_than_operator_is_rejected_with_403_for_any_request(
    path: str, node: Fuzzed
) -> None:
    data = node.served.data
    data.follower.state = history()
    data.commands.ran.clear()
    data.resets.begun.clear()
    before = encode_state(data.follower.state)

    @fuzzed
    @given(node.schema[path]["POST"].as_strategy())
    def check(case: Any) -> None:
        for name in ("sub", "feed", "n1"):
            assert node.send(case, name).status_code == 403

    check()
    assert not data.commands.ran
    assert not data.resets.begun
    assert encode_state(data.follower.state) == before


@pytest.mark.parametrize("path", sorted({path for _, path in OPERATIONS}))
def test_undescribed_method_returns_405_with_allowed_methods(path: str, node: Fuzzed) -> None:
    described = {method for method, other in OPERATIONS if other == path}
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} - described:
        response = node.ask(method, path)
        assert (response.status_code, response.json()["error"]) == (405, "MethodNotAllowed")
        assert set(response.headers["Allow"].split(", ")) - {"HEAD"} == described
