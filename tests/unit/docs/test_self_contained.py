"""The check of a built site finds what a page would load from elsewhere, and links that lead nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.self_contained import complaints

WHOLE = '<link rel="stylesheet" href="style.css?v=1"><h1 id="top">t</h1><a href="#top">up</a>'


def site(folder: Path, body: str) -> list[str]:
    (folder / "index.html").write_text(body)
    (folder / "style.css").write_text("a { background: url(data:image/png;base64,) }")
    return list(complaints(folder))


def test_a_site_of_its_own_files_has_no_complaints(tmp_path: Path) -> None:
    assert site(tmp_path, WHOLE + '<a href="https://example.org/">followed by a click alone</a>') == []


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('<script src="https://example.org/x.js"></script>', "index.html: loads https://example.org/x.js"),
        ('<img src="//example.org/x.png">', "index.html: loads //example.org/x.png"),
        ('<link rel="preload" href="http://example.org/f">', "index.html: loads http://example.org/f"),
        ('<img src="x.png">', "index.html: loads x.png, which is not there"),
        ('<a href="other.html">x</a>', "index.html: links to other.html, which is not there"),
        ('<a href="#bottom">x</a>', "index.html: links to #bottom: no such place"),
    ],
)
def test_what_leaves_the_site_or_leads_nowhere_is_told(body: str, complaint: str, tmp_path: Path) -> None:
    assert site(tmp_path, body) == [complaint]


def test_a_font_of_a_style_sheet_is_told(tmp_path: Path) -> None:
    (tmp_path / "font.css").write_text('@import "https://example.org/font.css";')
    assert site(tmp_path, WHOLE) == ["font.css: loads https://example.org/font.css"]
