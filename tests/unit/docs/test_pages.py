"""Links of the pages lead somewhere, in a repository as on the site, and every page is in the contents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.docs.shown import DOCS, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CONTENTS = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]


def places(page: Path) -> set[str]:
    """Return the names that GitHub, and MyST with ``myst_heading_anchors``, give to a page's headings."""
    headings = HEADING.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        name, _, place = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (place and place not in places(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_in_the_contents_once() -> None:
    listed = [
        entry.rpartition("<")[2].rstrip(">")
        for body in CONTENTS.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
        for entry in body.splitlines()
        if entry and not entry.startswith(":")
    ]
    written = [entry for entry in listed if not entry.startswith("commands/")]  # made when the site is built
    assert sorted(written) == sorted(path.stem for path in DOCS if path.stem != "index")
