"""``sppo data show``: one document as text, with what is trained on marked."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from sppo.cli.arguments import Json
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, emit
from sppo.data.document_text import DocumentText, document_text
from sppo.data.tokens import open_tokens
from sppo.quoting import one_line
from sppo.units import counted

_TRAINED_STYLE, _OTHER_STYLE = "bold green", "dim"
_MARKS = ("«", "»")
_SHOWN_IDS = 32
_EXCERPT_PIECES = 12
"""Most pieces of an excerpt."""
_CUT = "\n[...]\n"


def show(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Token data, written by sppo data prepare.")
    ],
    number: Annotated[
        int, typer.Argument(metavar="N", help="Number of the document, from 0.", min=0)
    ] = 0,
    trained_only: Annotated[
        bool, typer.Option("--trained-only", help="Print the text that is trained on, no other.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Print one document as text, and mark what of it is trained on.

    Text that is trained on is coloured on a terminal, and stands between « and » elsewhere. The
    first line tells how many tokens are trained on, what --train-on asked for, and by which method
    the text of the assistant was told. JSON has all ids, and for each whether it is trained on.

        sppo data show data/chat 3
    """
    with exit_codes():
        shown = document_text(open_tokens(directory), number)
    emit(
        lambda: _values(shown),
        lambda: document_screen(shown, trained_only=trained_only),
        as_json=json_output,
    )


def document_screen(
    shown: DocumentText, *, trained_only: bool = False, most_characters: int | None = None
) -> Screen:
    """Yield the figures of a document, and its text with marks.

    Args:
        shown: The document.
        trained_only: Leave out the text that is not trained on.
        most_characters: Most characters of each piece of text, cut in the middle, and no more than
            the first pieces; None for all.
    """
    num_trained = sum(shown.trained)
    yield (
        f"document {shown.document} of {shown.num_documents:,} (from 0):"
        f" {counted(len(shown.ids), 'token')}, {num_trained:,} trained on"
        f" ({num_trained / len(shown.ids):.1%})"
        + (f": {shown.train_on}" if shown.train_on else "")
        + (f", told by {shown.mask_method}" if shown.mask_method else "")
    )
    more = " ..." if len(shown.ids) > _SHOWN_IDS else ""
    yield f"ids: {' '.join(map(str, shown.ids[:_SHOWN_IDS]))}{more}"
    text = Text()
    coloured = Console().is_terminal
    pieces = [piece for piece in shown.pieces if piece.trained or not trained_only]
    most_pieces = len(pieces) if most_characters is None else _EXCERPT_PIECES
    for piece in pieces[:most_pieces]:
        written = _printable(_cut(piece.text, most_characters))
        if piece.trained and not coloured:
            written = written.join(_MARKS)
        text.append(written, style=_TRAINED_STYLE if piece.trained else _OTHER_STYLE)
        if trained_only:
            text.append("\n")
    text.rstrip()
    yield text
    if len(pieces) > most_pieces:
        yield f"[... and {len(pieces) - most_pieces:,} more pieces; sppo data show prints all]"


def _values(shown: DocumentText) -> dict[str, object]:
    return {
        **asdict(shown),
        "num_tokens": len(shown.ids),
        "num_trained": sum(shown.trained),
    }


def _cut(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    return text[: most // 2] + _CUT + text[-most // 2 :]


def _printable(text: str) -> str:
    """Return text without characters that would move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() or c in "\n\t" else one_line(c) for c in text)
