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

from tests.documents import ROOT, blocks, pages, prose

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z]+:")


def _script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference():
    return _script("reference_pages")


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[x](docs/nowhere.md)", "no such file"),
        ("[x](docs/glossary.md#nothing)", "no such heading"),
        ("![x](docs/pictures/nothing.png)", "no such file"),
        ("[x](#nothing-here)", "no such heading"),
    ],
)
def test_a_broken_link_is_found(text, says):
    (found,) = broken_links(ROOT / "README.md", text)
    assert says in found


def test_good_links_are_not_found():
    good = "[x](docs/glossary.md#who-computes) [y](https://example.org/z) [z](#install)"
    assert not list(broken_links(ROOT / "README.md", good))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    for module in ("mkdocs", "material"):
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


def test_the_site_has_every_page(site):
    expected = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in pages()[1:]}
    assert expected <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_every_page_is_in_the_navigation(site):
    home = (site / "index.html").read_text()
    missing = [
        name
        for page in pages()[1:]
        if (name := page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()) not in home
    ]
    assert not missing


def test_the_site_loads_nothing_from_elsewhere(site):
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^\s>]*")
    found = {
        f"{path.relative_to(site)}: {match}"
        for path in site.rglob("*.html")
        for match in loads.findall(path.read_text())
    }
    assert not found
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)]*", styles)
    assert not [page for page in pages() if "mermaid" in {b.language for b in blocks(page)}]


def test_links_out_of_the_site_name_the_file():
    outer = _script("site_links").without_outer_links
    text = "[`x.py`](../../sppo/x.py) [the run](../../a/b.json#c) [d](../d.md) `[e](../../../f)`"
    expected = "`sppo/x.py` the run (`a/b.json`) [d](../d.md)"
    assert outer(text, source="howto/a.md").startswith(expected)
    fenced = "```text\n[x](../../x)\n```"
    assert outer(fenced, source="howto/a.md") == fenced


def test_reference_pages_are_what_the_code_says(reference):
    assert not reference.stale(), "python scripts/reference_pages.py"


def test_a_stale_page_is_named(reference, tmp_path, monkeypatch, capsys):
    for name in reference.PAGES:
        (tmp_path / name).write_text((reference.DIRECTORY / name).read_text())
    (tmp_path / "files.md").write_text("old")
    (tmp_path / "presets.md").unlink()
    monkeypatch.setattr(reference, "DIRECTORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["reference_pages.py", "--check"])
    monkeypatch.setattr(reference.stale, "__defaults__", (tmp_path,))
    assert reference.main() == 1
    said = capsys.readouterr().out
    assert "files.md" in said
    assert "presets.md" in said
    assert "policies.md" not in said


def test_pages_do_not_depend_on_the_machine(reference, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(os, "cpu_count", lambda: 77)
    assert not reference.stale()


def test_every_command_and_key_is_in_the_reference(reference):
    from typer.testing import CliRunner

    from sppo.cli.app import app

    commands = (reference.DIRECTORY / "commands.md").read_text()
    listed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    for name in re.findall(r"^│ (\w+) ", listed, re.MULTILINE):
        assert f"## `sppo {name}" in commands
    keys = (reference.DIRECTORY / "run_file.md").read_text()
    for key in ("parallel.zero", "model.rope_scaling.beta_fast", "hardware.margin"):
        assert f"#### `{key}`" in keys


def test_a_field_without_a_description_is_refused(reference):
    from dataclasses import dataclass

    @dataclass
    class Bare:
        """Something."""

        name: str

    with pytest.raises(ValueError, match=r"Bare: name: no description"):
        reference._fields_table(Bare)


def test_every_package_is_in_the_architecture():
    text = (ROOT / "docs/architecture.md").read_text()
    packages = [path.parent.name for path in ROOT.glob("sppo/*/__init__.py")]
    assert not [name for name in packages if f"\n  {name}/ " not in text]


def test_files_of_figures_are_listed():
    text = (ROOT / "docs/results.md").read_text()
    for path in Path(ROOT / "docs/results").iterdir():
        if path.is_file():
            assert f"(results/{path.name})" in text
