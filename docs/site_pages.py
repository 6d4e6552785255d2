"""What differs between a page in the repository and on the site: drawings, and links that show a file's name.

In a page a drawing is an ordinary image, so that it shows wherever Markdown does. As an image of its own it
has a style for the reader's system; inside a page of the site the page's colours hold, and that style is left
out. A link whose text is the name of a page's file shows the name without its ending.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

STANDALONE = re.compile(r"<style>.*?</style>\s*", re.DOTALL)
NAMED = re.compile(r"\[(?:docs/)?([\w-]+)\.md\]\(")


class InlineDrawings(SphinxPostTransform):
    """Replaces each image of ``drawings/`` by its SVG, with the image's text as its label."""

    default_priority = 1
    formats: ClassVar[tuple[str, ...]] = ("html",)

    def run(self, **_: object) -> None:
        """Change the page's tree in place."""
        for image in list(self.document.findall(nodes.image)):
            if image["uri"].startswith("drawings/"):
                svg = (Path(self.app.srcdir) / image["uri"]).read_text(encoding="utf-8")
                label = f'aria-label="{html.escape(image["alt"])}"'
                svg = re.sub('aria-label="[^"]*"', lambda _, label=label: label, svg, count=1)
                inline = f'<div class="drawing">{STANDALONE.sub("", svg)}</div>'
                image.replace_self(nodes.raw("", inline, format="html"))


def shorten(_app: Sphinx, _name: str, text: list[str]) -> None:
    """Leave the endings of files out of the texts of links; Sphinx gives a page's text as a list of one."""
    text[0] = NAMED.sub(r"[\1](", text[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register both with Sphinx."""
    app.add_post_transform(InlineDrawings)
    app.connect("source-read", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
