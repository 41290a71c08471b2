"""Completeness of the table of operators, and the documentation page generated from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from operator_table import functions, markdown, rows

from rt.query import operators

DOCS = Path(__file__).parents[2] / "docs" / "operators.md"


def test_operators_page_matches_operator_docstrings(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite"):
        DOCS.write_text(markdown(), encoding="utf-8")
    assert DOCS.read_text(encoding="utf-8") == markdown()


def test_every_operator_is_listed_and_documents_its_output_and_saved_state() -> None:
    assert [row.name for row in rows() if not (row.emits and row.saves)] == []
    listed = {name for row in rows() for name in (row.name, *row.also)}
    without_state = {"compose"}
    assert {name for names in functions().values() for name in names} - listed == without_state


def test_operators_listed_with_object_state_are_those_that_use_object_space() -> None:
    modules = {row.module for row in rows() if row.keeps_objects}
    sources = {
        path.stem: path.read_text(encoding="utf-8") for path in Path(operators.__path__[0]).rglob("*.py")
    }
    assert modules == {module for module, source in sources.items() if "self.objects." in source}
