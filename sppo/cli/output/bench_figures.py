"""Formats of measured figures."""

from __future__ import annotations

from collections.abc import Iterable

NOT_MEASURED = "–"
_TERA_FROM = 1e13


def flops_unit(rates: Iterable[float]) -> tuple[float, str]:
    """Return (divisor, name) of the unit of rates: TFLOP/s from 10 TFLOP/s on, else GFLOP/s."""
    return (1e12, "TFLOP/s") if max(rates) >= _TERA_FROM else (1e9, "GFLOP/s")


def format_rates(rates: Iterable[float], *, unit: float = 1e9) -> str:
    """Return ``123 / 4.5``: rates in ``unit``, whole numbers from ten on, two digits below."""
    values = [rate / unit for rate in rates]
    return " / ".join(f"{v:.0f}" if v >= 9.95 else f"{v:.2g}" for v in values) or NOT_MEASURED
