"""Tables of the pages that are made from reports in docs/results.

    python -m experiments.tables            writes them into all pages that ask for one
    python -m experiments.tables --check    writes nothing, exits with 1 and names stale pages

A page asks for a table with two comments, between which it is written::

    <!-- table: peers -->
    <!-- end of table -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from experiments import claims, first_screen, harness, models
from sppo.output_file import write_text
from sppo.units import format_bytes

RESULTS = harness.ROOT / "docs/results"
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


@cache
def report(name: str) -> dict[str, Any]:
    """Return the report ``docs/results/NAME.json``."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def peers() -> str:
    """Return tokens per second and device of one node: others measured, SPPO planned."""
    rows = []
    for row in report("planned_peers")["rows"]:
        plan, own_rates = row["plans"]["published"], row["plans"]["measured"]
        rows.append(
            (
                row["tokens"],
                f"{row['measured'][row['best']]} ({row['best']})",
                f"{plan['tokens_per_s']:.0f}",
                f"{own_rates['tokens_per_s']:.0f}",
                format_bytes(plan["node_host_peak_bytes"]),
                "" if row["ulysses_priced"] is None else _error(row["ulysses_priced"]),
            )
        )
    headings = (
        "tokens",
        "others, *measured*",
        "SPPO, *simulated*",
        "with rates of our H100",
        "host memory a node",
        "cost model on their Ulysses",
    )
    return markdown(headings, rows)


def _error(predicted_over_measured: float) -> str:
    """Return by how much a prediction is too fast or too slow."""
    error = round(100 * (predicted_over_measured - 1))
    return f"{abs(error)} % too {'slow' if error > 0 else 'fast'}"


def ours_and_published() -> str:
    """Return steps and memory that others measured beside those of the cost model."""
    rows = []
    for row in report("compare_published")["configurations"]:
        memory, ratio = row["measured_bytes"], row["memory_ratio"]
        rows.append(
            (
                row["name"],
                f"{row['measured_s']:.4g}",
                f"{row['predicted_s']:.4g}",
                f"{row['time_ratio']:.2f}",
                "" if memory is None else f"{memory / 2**30:.1f}",
                f"{row['predicted_bytes'] / 2**30:.1f}",
                "" if ratio is None else f"{ratio:.2f}",
            )
        )
    headings = "", "step, s", "predicted", "ratio", "memory, GiB", "predicted", "ratio"
    return markdown(headings, rows)


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
    "peers": peers,
    "lead": lambda: first_screen.lead(report("planned_peers")),
    "measured": measured,
    "published": ours_and_published,
    "models": lambda: models.markdown(report("planned_models")["rows"]),
    "hybrids": lambda: models.markdown(report("planned_hybrids")["rows"]),
}
"""Function that makes each table, by the name by which pages ask for it."""


def markdown(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    names = list(headings)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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
