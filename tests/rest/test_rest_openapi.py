"""The OpenAPI document and the docs page: validity, completeness, and roles of the described paths."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from openapi_spec_validator import OpenAPIV31SpecValidator
from rest_node import node_view

from rt.net.identity import ROLES
from sequencer.rest.http.dispatcher import Dispatcher
from sequencer.rest.views.admin_actions import ACTIONS
from sequencer.rest.views.endpoints import ENDPOINTS, EVERYBODY, OPERATORS
from sequencer.rest.views.openapi import docs_page, document


def test_openapi_document_is_valid() -> None:
    OpenAPIV31SpecValidator(document(ENDPOINTS, ACTIONS)).validate()


def test_openapi_document_lists_exactly_the_served_routes() -> None:
    with ThreadPoolExecutor(1) as pool:
        routes = Dispatcher(ENDPOINTS, node_view, pool, stream="s", actions=ACTIONS).routes

    described = {
        (method.upper(), path)
        for path, operations in document(ENDPOINTS, ACTIONS)["paths"].items()
        for method in operations
    }

    assert routes == described | {("HEAD", path) for method, path in described if method == "GET"}
    assert {method for method, _ in described} == {"GET", "POST"}


def test_openapi_document_lists_every_parameter() -> None:
    paths = document(ENDPOINTS, ACTIONS)["paths"]

    for endpoint in ENDPOINTS:
        told = [one["name"] for one in paths[endpoint.path]["get"].get("parameters", [])]
        assert told == [parameter.name for parameter in endpoint.parameters]


def test_non_operator_and_public_paths_match_fixed_lists() -> None:
    open_paths = {one.path for one in ENDPOINTS if one.roles != OPERATORS}

    assert open_paths == {
        "/readiness",
        "/liveness",
        "/latest-out-position",
        "/log-history",
        "/rt-clients",
        "/dedup-rt-clients",
        "/holds",
    }
    assert all(action.roles == OPERATORS for action in ACTIONS)
    assert set(ROLES) == EVERYBODY
    assert {one.path for one in ENDPOINTS if one.is_public} == {"/readiness", "/liveness", "/metrics"}


def test_docs_page_shows_every_path_and_loads_no_resources() -> None:
    page = docs_page(ENDPOINTS, ACTIONS)

    assert all(f"GET {endpoint.path}</h2>" in page for endpoint in ENDPOINTS)
    assert all(f"POST {action.path}</h2>" in page for action in ACTIONS)
    assert "logPos" in page
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page) == ["openapi.json"]
    assert not re.search(r"<script|<link|@import|url\(|https?://", page)
