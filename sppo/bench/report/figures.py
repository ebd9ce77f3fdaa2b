"""Formats of measured figures in tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table

NOT_MEASURED = "–"
_TERA_FROM = 1e13


def measurement_table(title: str) -> Table:
    """Return an empty table with a line below its heading and no frame."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def flops_unit(rates: Iterable[float]) -> tuple[float, str]:
    """Return (divisor, name) of the unit of rates: TFLOP/s from 10 TFLOP/s on, else GFLOP/s."""
    return (1e12, "TFLOP/s") if max(rates) >= _TERA_FROM else (1e9, "GFLOP/s")


def format_rates(rates: Iterable[float], *, unit: float = 1e9) -> str:
    """Return ``123 / 4.5``: rates in ``unit``, whole numbers from ten on, two digits below."""
    values = [rate / unit for rate in rates]
    return " / ".join(f"{v:.0f}" if v >= 9.95 else f"{v:.2g}" for v in values) or NOT_MEASURED
