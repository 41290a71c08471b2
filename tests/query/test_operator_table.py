"""The table of operators says what there is, and the documentation is made of it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from rt.query import operators
from rt.query.operators import creation
from rt.query.operators.table import markdown, rows

DOCS = Path(__file__).parents[2] / "docs" / "operators.md"


def test_the_documentation_of_operators_is_what_they_say_of_themselves(
    request: pytest.FixtureRequest,
) -> None:
    if request.config.getoption("--rewrite"):
        DOCS.write_text(markdown(), encoding="utf-8")
    assert DOCS.read_text(encoding="utf-8") == markdown()


def test_every_operator_says_what_it_emits_and_what_it_saves() -> None:
    assert [row.name for row in rows() if not (row.emits and row.saves)] == []


def test_no_operator_is_missing_in_the_table() -> None:
    listed = {name for row in rows() for name in (row.name, *row.also)}
    others = {"catch", "combine_latest", "compose", "concat", "merge", "zip"}  # of creation, but for compose
    for package in (operators, creation):
        there = {name for name in package.__all__ if inspect.isfunction(getattr(package, name))}
        assert there - listed - others == set()


def test_operators_of_large_state_are_those_that_get_objects() -> None:
    modules = {row.module for row in rows() if row.keeps_objects}
    sources = {
        path.stem: path.read_text(encoding="utf-8") for path in Path(operators.__path__[0]).glob("*.py")
    }
    assert modules == {module for module, source in sources.items() if "self.objects." in source}
