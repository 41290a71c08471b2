"""The status page at `/`: static files of this package, served unchanged, without a build step.

Invariants:
- The browser loads scripts, styles and data only from this node, and runs no inline script (`POLICY`).
- Names from clients are inserted as text, never as markup.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

from msgspec import Struct

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
    "page.css": "Its style sheet.",
    "icon.svg": "Its icon.",
    "main.js": "Polls the node and updates the page.",
    "poll.js": "Polling.",
    "rates.js": "Rates from successive answers.",
    "sections.js": "The sections of the page.",
    "history.js": "The timeline of the merged log.",
    "dom.js": "DOM helpers.",
    "words.js": "Formatting of numbers and times.",
}


class PageFile(Struct, frozen=True):
    path: str
    summary: str
    content_type: str
    text: str


def _read(name: str, summary: str) -> PageFile:
    text = resources.files(__name__).joinpath(name).read_text("utf-8")
    path = "/" if name == "page.html" else f"/page/{name}"
    return PageFile(path, summary, _KINDS[name.rpartition(".")[2]], text)


PAGE_FILES: Final = tuple(_read(name, summary) for name, summary in _FILES.items())
