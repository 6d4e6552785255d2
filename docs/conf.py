"""How Sphinx makes the site of docs/: ``python -m sphinx -W -b html docs docs/_build``.

Pages are Markdown that reads as well on a repository's own pages: links are relative, drawings are images.
Nothing is fetched, neither here nor by the pages; ``tests/unit/docs`` checks what they refer to.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Sphinx may be started from anywhere

project = "tensortrace"
author = "the tensortrace authors"
release = version = installed_version("tensortrace")
html_title = "tensortrace"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "docs.commands_pages",
    "docs.site_pages",
]
exclude_patterns = ["_build"]

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
default_role = "code"
smartquotes = False  # -- begins an option

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1f5fbf",
        "color-brand-content": "#1f5fbf",
        "color-code-background": "#f3f4f6",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7fb2ff",
        "color-brand-content": "#7fb2ff",
        "color-code-background": "#1b1e23",
    },
    "footer_icons": [],
}
