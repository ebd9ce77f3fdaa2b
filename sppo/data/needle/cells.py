"""Cells of needle data, in ``cells.json``: length and depth of each document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from sppo.config.json_file import first_problem, read_json
from sppo.data.tokens import CELLS_FILE
from sppo.output_file import write_json


@dataclass(frozen=True, slots=True)
class Cell:
    """Length and depth of one needle document, and the value that it asks for."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    document: int
    """Number of the document in the token data."""
    length: Annotated[int, Field(ge=1)]
    """Number of tokens of the document."""
    depth: Annotated[int, Field(ge=0, le=100)]
    """Share of the text that stands before the value which is asked for, in percent."""
    key: str
    """Name of that value."""
    answer: str
    """The value, whose tokens are the labels that count."""


@dataclass(frozen=True, slots=True)
class Cells:
    """Contents of ``cells.json``."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    keys: int
    """Number of values hidden in each document, of which one is asked for."""
    seed: int
    cells: tuple[Cell, ...]
    """Cell of each document, in order."""


_CELLS = TypeAdapter(Cells)


def write_cells(directory: Path, cells: Cells) -> None:
    """Write ``cells.json`` into a token directory."""
    write_json(directory / CELLS_FILE, asdict(cells))


def read_cells(directory: Path, *, num_documents: int) -> Cells | None:
    """Return the cells of token data; None if the data is not of needles.

    Args:
        directory: Token directory.
        num_documents: Number of its documents.

    Raises:
        ValueError: The file is damaged, or is not that of the documents.
    """
    path = directory / CELLS_FILE
    if not path.exists():
        return None
    fix = "write the data again with `sppo data needle --force`"
    try:
        cells = _CELLS.validate_python(read_json(path))
    except ValidationError as error:
        raise ValueError(f"{path}: {first_problem(error)}; {fix}") from None
    if [cell.document for cell in cells.cells] != list(range(num_documents)):
        raise ValueError(f"{path}: not one cell for each of {num_documents} documents; {fix}")
    return cells
