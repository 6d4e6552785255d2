"""Puts the drawings of docs/drawings into the pages themselves, where they take on the theme's colours.

In a page a drawing is an ordinary image, so that it shows wherever Markdown does. As an image of its own it
has a style for the reader's system; inside a page the page's colours hold, and that style is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

STANDALONE = re.compile(r"<style>.*?</style>\s*", re.DOTALL)


class InlineDrawings(SphinxPostTransform):
    """Replaces each image of ``drawings/`` by its SVG, with the image's text as its label."""

    default_priority = 1
    formats: ClassVar[tuple[str, ...]] = ("html",)

    def run(self, **_: object) -> None:
        """Change the page's tree in place."""
        for image in list(self.document.findall(nodes.image)):
            if image["uri"].startswith("drawings/"):
                svg = (Path(self.app.srcdir) / image["uri"]).read_text(encoding="utf-8")
                html = f'<div class="drawing">{STANDALONE.sub("", svg)}</div>'
                image.replace_self(nodes.raw("", html, format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform with Sphinx."""
    app.add_post_transform(InlineDrawings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
