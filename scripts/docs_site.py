"""Hook of mkdocs: adds the generated pages to the site, and adapts links to files outside of docs/.

In the repository ``[text](../sppo/x.py)`` opens the file, also where the descriptions in that file
are a page of the site: there the link opens this page. Of all other files the site has no copy; the
text of the link is kept, followed by the path if the text does not name it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import reference_pages  # beside this file

_PAGES = {
    "sppo/activations/policy.py": "policies.md",
    "sppo/cli": "commands.md",
    "sppo/cli/exit_codes.py": "exit_codes.md",
    "sppo/config/model/presets.py": "presets.md#models",
    "sppo/hardware/presets.py": "presets.md#machines",
    "sppo/planning/plan.py": "files.md#planjson",
    "sppo/report/metrics.py": "files.md#metricsjsonl",
    "sppo/report/run_summary.py": "files.md#run_summaryjson",
    "sppo/schedule/orders/names.py": "schedules.md",
}
"""Page of the site that has the descriptions in a file of the repository."""
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^ *```.*?^ *```\s*$)", re.DOTALL | re.MULTILINE)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that are made from the code."""
    from mkdocs.structure.files import File

    for name, make in reference_pages.PAGES.items():
        files.append(File.generated(config, f"reference/{name}", content=make()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page with links that work on the site."""
    return with_links_of_the_site(markdown, source=page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """Return a page without the roles before names in docstrings."""
    return re.sub(r":(?:class|func|meth|data|mod):(?=<code>)", "", html)


def with_links_of_the_site(markdown: str, *, source: str) -> str:
    """Return `markdown` with links to files outside of ``docs`` replaced.

    Args:
        markdown: Text of a page.
        source: Path of the page below ``docs``.
    """
    folder = posixpath.join("docs", posixpath.dirname(source))

    def replaced(link: re.Match[str]) -> str:
        text, target = link.groups()
        if re.match(r"[a-z]+:|#|/", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))
        if path.startswith("docs/"):
            return link[0]
        if path in _PAGES:
            return f"[{text}]({posixpath.relpath('docs/reference', folder)}/{_PAGES[path]})"
        named = text.strip("`")
        return f"`{path}`" if path.endswith(named) else f"{text} (`{path}`)"

    parts = _FENCE.split(markdown)
    return "".join(p if i % 2 else _LINK.sub(replaced, p) for i, p in enumerate(parts))
