"""Tables of the pages that are made from reports in docs/results.

    python -m experiments.tables            writes them into all pages that ask for one
    python -m experiments.tables --check    writes nothing, exits with 1 and names stale pages

A page asks for a table with two comments, between which it is written::

    <!-- table: peers -->
    <!-- end of table -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from experiments import claims, comparison, first_screen, harness, models, restart_seconds
from experiments.reports import markdown, report
from sppo.output_file import write_text

_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def measured() -> str:
    """Return steps and memory that were measured, beside predictions and other programs."""
    rows = first_screen.rows(
        gpu_128k=report("gpu_h100_128Ki"),
        gpu_32k=report("gpu_h100"),
        cpu=report("compare_cpu_growth"),
    )
    return markdown(first_screen.HEADINGS, rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "claims": lambda: markdown(claims.HEADINGS, claims.rows(report)),
    "peers": comparison.peers,
    "lead": lambda: first_screen.lead(report("planned_peers")),
    "larger": lambda: first_screen.larger(report("planned_models")),
    "measured": measured,
    "others": comparison.measured_by_others,
    "methods": comparison.methods,
    "published": comparison.ours_and_published,
    "paper": comparison.paper,
    "restart": lambda: markdown(*restart_seconds.median_row(report("restart_seconds"))),
    "models": lambda: models.markdown(report("planned_models")["rows"]),
    "hybrids": lambda: models.markdown(report("planned_hybrids")["rows"]),
}
"""Function that makes each table, by the name by which pages ask for it."""


def with_tables(text: str) -> str:
    """Return a page with its tables as they are in the reports.

    Raises:
        KeyError: The page asks for a table that does not exist.
    """
    return _MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def stale_pages() -> Iterator[tuple[Path, str]]:
    """Yield each page whose tables differ from the reports, and what it should be."""
    for page in (harness.ROOT / "README.md", *sorted((harness.ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if (wanted := with_tables(text)) != text:
            yield page, wanted


def main() -> int:
    """Write the tables into all pages, or check them; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, name stale pages")
    check = parser.parse_args().check
    stale = list(stale_pages())
    for page, wanted in stale:
        if check:
            print(f"{page.relative_to(harness.ROOT)} is stale: python -m experiments.tables")
        else:
            write_text(page, wanted)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
