"""``sppo data needle``: write documents that test whether a model finds a value in a long text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sppo.cli.arguments import Json
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, emit, working
from sppo.config.base import MOST_TOKENS, comma_list
from sppo.data.needle.prepare import MOST_KEYS, NeedleData, Needles, prepare_needles
from sppo.quoting import quoted
from sppo.units import counted, parse_size


def needle(
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|PATH", help="As for sppo data prepare, of the model.")
    ],
    haystack: Annotated[
        list[Path],
        typer.Option(
            metavar="PATH", help="Text to hide values in: a file or directory; may be repeated."
        ),
    ],
    lengths: Annotated[
        str, typer.Option(metavar="N,N...", help="Lengths of documents in tokens: 32Ki,64Ki,128Ki.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write.")],
    depths: Annotated[
        str,
        typer.Option(
            metavar="FIRST:LAST:STEP",
            help="Where the value stands, in percent of the text; or a list: 0,50,100.",
        ),
    ] = "0:100:10",
    keys: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=MOST_KEYS,
            help="Values hidden in each document; one is asked for.",
        ),
    ] = 1,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Write each document as a chat, as the model's template makes it."
        ),
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|chatml",
            show_default=False,
            help="Template of --chat. Without it the tokenizer's own.",
        ),
    ] = None,
    per_cell: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=1 << 16, help="Documents of each length and depth."),
    ] = 1,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Draws keys, values, and places in the haystack.")
    ] = 0,
    glob: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Which files below a directory, e.g. '*.txt'."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace token data already in --out.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Write documents that hide a number in a long text, and end with a question for it.

    Only the answer counts in the loss: sppo eval reports the share of documents whose answer is
    predicted, by length and depth.

        sppo data needle --tokenizer bytes --haystack book.txt --lengths 4Ki,8Ki --out data/needle
    """
    with exit_codes():
        asked = Needles(
            lengths=_lengths(lengths),
            depths=_depths(depths),
            keys=keys,
            per_cell=per_cell,
            seed=seed,
        )
        with working("tokenizing the haystack"):
            prepared = prepare_needles(
                haystack,
                asked,
                tokenizer=tokenizer,
                out=out,
                globs=glob or (),
                chat=chat,
                chat_template=chat_template,
                force=force,
            )
    emit(lambda: asdict(prepared), lambda: _screen(prepared, asked), as_json=json_output)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [parse_size(part) for part in comma_list(text)]
    except ValueError as error:
        raise ValueError(f"--lengths: {error}") from None
    for length in lengths:
        if not 1 <= length <= MOST_TOKENS:
            raise ValueError(f"--lengths {length}: a length is from 1 to {MOST_TOKENS:,} tokens")
    return lengths


def _depths(text: str) -> list[int]:
    """Return the depths of ``0:100:10`` or ``0,50,100``."""
    problem = ValueError(
        f"--depths {quoted(text)}: write whole percents from 0 to 100, as FIRST:LAST:STEP such as "
        "0:100:10, or as a list such as 0,50,100"
    )
    try:
        numbers = [int(part) for part in text.split(":" if ":" in text else ",")]
    except ValueError:
        raise problem from None
    if ":" in text:
        if len(numbers) != 3 or numbers[2] < 1:
            raise problem
        first, last, step = numbers
        if not 0 <= first <= last <= 100:
            raise problem
        return list(range(first, last + 1, step))
    if not all(0 <= depth <= 100 for depth in numbers):
        raise problem
    return numbers


def _screen(prepared: NeedleData, asked: Needles) -> Screen:
    """Yield whether documents were written, and which."""
    verb = "holds these documents already; nothing was written" if prepared.unchanged else "written"
    yield f"{prepared.directory}: {verb}"
    lengths, depths = len(set(asked.lengths)), len(set(asked.depths))
    yield (
        f"{counted(prepared.num_documents, 'document')} of {counted(lengths, 'length')} and "
        f"{counted(depths, 'depth')}, {asked.keys} hidden in each, {prepared.num_tokens:,} tokens; "
        f"{prepared.num_counting_tokens:,} tokens of answers count in the loss"
    )
