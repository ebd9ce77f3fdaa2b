"""Runs without painting their plots, which takes most of the time of a run of a few steps.

A plot is built from the data of the run as usual; only its pixels are left out. Tests of the plots
and the commands of the README paint them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from sppo.output_file import write_bytes


def _write(path: Path, figure: Any, *, dpi: float | None = None) -> None:
    """Instead of ``write_figure``: the same file, with nothing to look at."""
    assert figure.axes
    write_bytes(path, b"not painted")


@contextmanager
def unpainted() -> Iterator[None]:
    """Loss plots and timelines that are written in here are files, with nothing in them."""
    with (
        mock.patch("sppo.plots.loss.write_figure", _write),
        mock.patch("sppo.plots.timeline.write_figure", _write),
    ):
        yield
