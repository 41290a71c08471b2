"""The status page at `/`: files of this package, which a browser gets as they are.

Laws. Nothing comes from elsewhere, and nothing is built: what is here is what runs. The browser is told to
load scripts, styles and data from this node alone, and to run nothing that stands in the page itself. What
a client named stands in the page as text; the scripts make no markup of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Final

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the page."""
_KINDS: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES: Final = {
    "page.html": "The status page.",
    "page.css": "Its looks.",
    "icon.svg": "Its icon.",
    "main.js": "Asks the node, and has shown what it answers.",
    "poll.js": "How often it asks.",
    "rates.js": "Rates from successive answers.",
    "sections.js": "What it tells.",
    "history.js": "The timeline of the merged log.",
    "dom.js": "Elements.",
    "words.js": "Numbers and times.",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file: where it is answered, as what, and its text."""

    path: str
    summary: str
    content_type: str
    text: str


def _read(name: str, summary: str) -> PageFile:
    text = resources.files(__name__).joinpath(name).read_text("utf-8")
    path = "/" if name == "page.html" else f"/page/{name}"
    return PageFile(path, summary, _KINDS[name.rpartition(".")[2]], text)


PAGE_FILES: Final = tuple(_read(name, summary) for name, summary in _FILES.items())
