"""Hook of mkdocs that replaces links to files outside of docs/ by the path of the file.

In the repository ``[text](../sppo/x.py)`` opens the file. The site has no copy of the file, so the
text of the link is kept, followed by the path if the text does not name it.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^ *```.*?^ *```\s*$)", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page without links to files outside of ``docs``."""
    return without_outer_links(markdown, source=page.file.src_uri)


def without_outer_links(markdown: str, *, source: str) -> str:
    """Return `markdown` with links to files outside of ``docs`` replaced by text.

    Args:
        markdown: Text of a page.
        source: Path of the page below ``docs``.
    """

    def replaced(link: re.Match[str]) -> str:
        text, target = link.groups()
        if re.match(r"[a-z]+:|#|/", target):
            return link[0]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target))
        if path.startswith("docs/"):
            return link[0]
        path = path.partition("#")[0]
        named = text.strip("`")
        return f"`{path}`" if path.endswith(named) else f"{text} (`{path}`)"

    parts = _FENCE.split(markdown)
    return "".join(p if i % 2 else _LINK.sub(replaced, p) for i, p in enumerate(parts))
