"""Sphinx's configuration: `.ci/run doors` builds the site, with every warning an error. The API page is written by `make api`.

STROBE_REPOSITORY, e.g. https://github.com/OWNER/NAME, is where links to files outside of docs/ lead. Without it they are plain words."""

import os
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "Strobe"
author = "The Strobe authors"
project_copyright = f"2026, {author}"
release = ".".join(re.findall(r"^#define STROBE_VERSION_\w+ (\d+)", (ROOT / "include/strobe/strobe.h").read_text(), re.MULTILINE))

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # as on GitHub, where these pages are read as well
nitpicky = True
html_theme = "furo"
html_title = f"Strobe {release}"
html_show_sphinx = False


def _with_links_to_the_repository(app, page, source):
    """Pages and folders that are no part of the site are links to the repository."""
    repository = os.environ.get("STROBE_REPOSITORY")
    here = (DOCS / page).parent

    def link(found):
        words, target = found.groups()
        path = (here / target.partition("#")[0]).resolve()
        if "://" in target or target.startswith("#") or (path.is_relative_to(DOCS) and path.is_file()):
            return found[0]
        if not path.exists():
            return found[0]  # Sphinx warns of it
        return f"[{words}]({repository}/blob/HEAD/{path.relative_to(ROOT).as_posix()})" if repository else words

    blocks = re.split(r"(^```.*?^```)", source[0], flags=re.DOTALL | re.MULTILINE)
    source[0] = "".join(x if x.startswith("```") else re.sub(r"(?<!!)\[([^]]*)\]\(([^)\s]+)\)", link, x) for x in blocks)


def setup(app):
    app.connect("source-read", _with_links_to_the_repository)
