"""The generated pages of docs/ are what the code makes of them; `--rewrite` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_pages import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_what_the_code_makes_of_it(name: str, request: pytest.FixtureRequest) -> None:
    expected = PAGES[name]()
    if request.config.getoption("--rewrite"):
        (DOCS / name).write_text(expected, encoding="utf-8")

    found = (DOCS / name).read_text(encoding="utf-8") if (DOCS / name).exists() else ""
    assert found == expected, f"pytest {Path(__file__).name} --rewrite writes docs/{name}; then read the diff"
