"""MkDocs hook: the repository's own README files are pages of the site, so nothing is copied.

``extra.readme_pages`` in ``mkdocs.yml`` maps a page to the file it shows. Links in such a file are relative to it; here
they become links between pages. One that leads nowhere is a warning, which a strict build turns into an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOG = logging.getLogger("mkdocs.hooks.docs_pages")
CODE = re.compile(r"(^```.*?^```|^(?: {4}|\t).*?$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|!?\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")
SOURCE = re.compile(r'(src=")([^"]+)(")')


def target(link: str, page: str, pages: dict[str, str]) -> str | None:
    """Return where a link of ``page`` leads on the site; None if to a file of the repository that is no page."""
    path, hash_, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:|/", path):
        return link
    name = posixpath.normpath(posixpath.join(posixpath.dirname(pages[page]), path))
    by_file = {file: other for other, file in pages.items()}
    if name in by_file:
        found = by_file[name]
    elif name.startswith("docs/") and (ROOT / name).is_file():
        found = name.removeprefix("docs/")
    else:
        if not (ROOT / name).exists():
            LOG.warning("%s links to %s, which does not exist", pages[page], link)
        return None
    return posixpath.relpath(found, posixpath.dirname(page) or ".") + hash_ + anchor


def with_site_links(text: str, page: str, pages: dict[str, str]) -> str:
    """Return the text of a README with its links as they are on the site; code is left alone."""

    def link(match: re.Match[str]) -> str:
        image, label, to = match.groups()
        label = LINK.sub(link, label)
        there = target(to, page, pages)
        return label if there is None else f"{image}[{label}]({there})"

    def source(match: re.Match[str]) -> str:
        before, to, after = match.groups()
        return before + (target(to, page, pages) or to) + after

    parts = CODE.split(text)
    parts[::2] = [SOURCE.sub(source, LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each README."""
    from mkdocs.structure.files import File

    for page, readme in config.extra["readme_pages"].items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / readme)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn the links of a README into links between pages."""
    pages = config.extra["readme_pages"]
    name = page.file.src_uri
    return with_site_links(markdown, name, pages) if name in pages else markdown
