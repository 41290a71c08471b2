"""The generated pages of docs/ match the code; `--rewrite` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_pages import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_matches_page_generated_from_code(name: str, request: pytest.FixtureRequest) -> None:
    expected = PAGES[name]()
    if request.config.getoption("--rewrite"):
        (DOCS / name).write_text(expected, encoding="utf-8")

    found = (DOCS / name).read_text(encoding="utf-8") if (DOCS / name).exists() else ""
    assert found == expected, f"pytest {Path(__file__).name} --rewrite writes docs/{name}; then read the diff"
