"""Documentation site: its links, its build, and the pages generated from the code."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest

import sppo
from scripts import reference_pages
from sppo.cli.app import SUBCOMMANDS
from sppo.config import RunConfig
from sppo.config.problems import RUN_KEYS
from tests.documents import ROOT, pages, prose

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z]+:")


@pytest.fixture(scope="module")
def hook():
    """The hook of mkdocs."""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts/docs_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plain(heading):
    """A heading without the marks of code and links."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")


def repository_anchor(heading):
    """As code hosting sites make it."""
    return re.sub(r"[^\w\- ]", "", _plain(heading).lower()).replace(" ", "-")


def site_anchor(heading):
    """As mkdocs makes it."""
    text = unicodedata.normalize("NFKD", _plain(heading)).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


@cache
def anchors(page):
    """Those that are the same in the repository and on the site."""
    headings = _HEADING.findall(prose(page))
    return {site_anchor(h) for h in headings} & {repository_anchor(h) for h in headings}


def broken_links(page, text):
    """What is wrong with the relative links of a page."""
    for target in _LINK.findall(text):
        if _ELSEWHERE.match(target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page(page):
    assert not list(broken_links(page, prose(page)))


def test_keys_that_pages_name_exist():
    key = re.compile(rf"(?<![\w/.])({'|'.join(RunConfig.model_fields)})\.([a-z_]+)\b(?![/\w.(])")
    named = {match for page in pages() for match in key.findall(prose(page))}
    keys = {(s, k) for s, ks in RUN_KEYS.items() for k in ks}
    assert len(named) > 100
    assert not {(s, k) for s, k in named - keys if k not in ("json", "jsonl", "md")}


def test_paths_in_code_spans_exist():
    path = re.compile(r"`((?:sppo|tests|scripts|experiments|configs|csrc|docs)/[\w./-]+)`")
    named = {match for page in pages() for match in path.findall(prose(page))}
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_architecture_page_shows_the_packages_and_their_sizes():
    page = (ROOT / "docs/architecture.md").read_text()
    shown = {name: int(size) for name, size in re.findall(r"^  (\w+)/ +(\d+)  ", page, re.M)}
    folders = [init.parent for init in sorted((ROOT / "sppo").glob("*/__init__.py"))]
    assert sorted(shown) == [folder.name for folder in folders]
    for folder in folders:
        lines = sum(len(file.read_bytes().splitlines()) for file in folder.rglob("*.py"))
        assert abs(lines / 1000 - shown[folder.name]) < 1, folder


def test_classes_that_the_architecture_page_names_are_in_the_linked_files():
    page = ROOT / "docs/architecture.md"
    named = re.findall(r"\[`([A-Z]\w+)`\]\(([^)]+)\)", prose(page))
    assert len(named) > 5
    for name, file in named:
        assert f"\nclass {name}" in (page.parent / file).read_text(), name


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="pip install -e '.[docs]'")
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.mark.exhaustive
def test_the_site_has_every_page_and_its_navigation_leads_there(site):
    written = [page.relative_to(ROOT / "docs") for page in pages()[1:]]
    written = [page for page in written if page.parent.name != "results"]
    generated = [Path("reference", name) for name in reference_pages.PAGES]
    names = [page.with_suffix(".html").as_posix() for page in [*written, *generated]]
    home = (site / "index.html").read_text()
    assert not [name for name in names if not (site / name).is_file() or name not in home]


def test_links_out_of_the_site_name_the_file_or_open_its_page(hook):
    text = "[`x.py`](../../sppo/x.py) [the run](../../a/b.json#c) [d](../d.md) `[e](../../../f)`"
    expected = "`sppo/x.py` the run (`a/b.json`) [d](../d.md)"
    assert hook.with_links_of_the_site(text, source="howto/a.md").startswith(expected)
    fenced = "```text\n[x](../../x)\n```"
    assert hook.with_links_of_the_site(fenced, source="howto/a.md") == fenced
    plan = hook.with_links_of_the_site("[plan](../sppo/planning/plan.py)", source="a.md")
    assert plan == "[plan](reference/files.md#planjson)"


def test_the_page_of_the_run_file_is_what_the_code_says():
    assert not reference_pages.is_stale(), "python scripts/reference_pages.py"


def test_every_command_and_name_is_in_the_reference():
    commands = reference_pages.commands_page()
    for name in SUBCOMMANDS:
        assert f"## `sppo {name}" in commands
    names = re.findall(r"^::: sppo\.(\w+)", (ROOT / "docs/reference/python.md").read_text(), re.M)
    assert sorted([*names, "__version__"]) == sorted(sppo.__all__)
