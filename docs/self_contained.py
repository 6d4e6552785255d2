"""Check that a built site needs nothing but its own files: ``python -m docs.self_contained docs/_build``.

What a page loads (scripts, styles, images, fonts) must lie in the folder, and so must what it links to, but
for addresses, which are followed only if somebody clicks on them. Exits with 1 and a line for each complaint.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

IN_STYLE = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])([^"')]+)""")
IMPORTS = frozenset({"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload"})
LOCAL = frozenset({"", "data"})
"""Schemes of what is loaded without a network."""


class References(HTMLParser):
    """Collects what a page ``loads`` and what it ``links`` to, and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element's references."""
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.places.add(given["id"])
        if "src" in given:
            self.loads.append(given["src"])
        if "style" in given:
            self.loads += IN_STYLE.findall(given["style"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and IMPORTS & set(given.get("rel", "").split()):
            self.loads.append(given["href"])


def complaints(site: Path) -> Iterator[str]:
    """Yield a line for each reference that leaves the site, or leads nowhere in it."""
    pages = {path: References(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for reference in page.loads:
            yield from _loaded(path, reference, site)
        for reference in page.links:
            yield from _linked(path, reference, site, pages)
    for path in sorted(site.rglob("*.css")):
        for reference in IN_STYLE.findall(path.read_text(encoding="utf-8")):
            yield from _loaded(path, reference, site)


def _loaded(path: Path, reference: str, site: Path) -> Iterator[str]:
    parts = urlsplit(reference)
    if parts.scheme not in LOCAL or parts.netloc:
        yield f"{path.relative_to(site)}: loads {reference}"
    elif not parts.scheme and parts.path and not (path.parent / unquote(parts.path)).exists():
        yield f"{path.relative_to(site)}: loads {reference}, which is not there"


def _linked(path: Path, reference: str, site: Path, pages: dict[Path, References]) -> Iterator[str]:
    parts = urlsplit(reference)
    if parts.scheme or parts.netloc:
        return
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.exists():
        yield f"{path.relative_to(site)}: links to {reference}, which is not there"
    elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
        yield f"{path.relative_to(site)}: links to {reference}: no such place"


def main() -> int:
    """Check the site in the folder given; return the exit code."""
    site = Path(sys.argv[1]).resolve()
    found = list(complaints(site))
    print("\n".join(found) or f"{sum(1 for _ in site.rglob('*.html'))} pages load nothing from elsewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
