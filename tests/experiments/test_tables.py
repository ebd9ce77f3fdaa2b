"""Tables of the pages that are made from reports."""

import pytest

from experiments import comparison, tables
from tests.documents import ROOT, pages


def test_no_table_of_a_page_is_stale():
    stale = [str(page.relative_to(ROOT)) for page, _ in tables.stale_pages()]
    assert not stale, "python -m experiments.tables"


def test_a_table_is_written_between_its_comments_and_an_unknown_one_is_refused():
    page = "a\n<!-- table: {} -->\nold\n<!-- end of table -->\nb\n"
    written = tables.with_tables(page.format("peers"))
    assert written == page.format("peers").replace("old", f"\n{comparison.peers()}\n")
    assert tables.with_tables(written) == written
    with pytest.raises(KeyError, match="unknown"):
        tables.with_tables(page.format("unknown"))


def test_every_table_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    assert not [name for name in tables.TABLES if f"<!-- table: {name} -->" not in text]
