"""Writing of needle data, for ``sppo data needle``.

Each document hides the values of some keys in a haystack, asks for one of them at its end, and
answers. Only the answer counts in the loss. All of its tokens are predicted if and only if greedy
decoding gives the answer, so evaluation needs no generation. The tasks are those called
*niah_single* and *niah_multikey* in RULER (arXiv 2404.06654).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sppo.data.chat.marked_text import MarkedText
from sppo.data.chat.template import ChatTemplate
from sppo.data.needle.cells import Cell, Cells, write_cells
from sppo.data.needle.haystack import Haystack, TextTokenizer, read_haystack
from sppo.data.preparation.destination import destination
from sppo.data.preparation.documents import check_text_files, find_files
from sppo.data.preparation.ids_files import IdsTokenizer
from sppo.data.preparation.prepare import choose_tokenizer
from sppo.data.preparation.token_writer import TokenWriter, check_destination
from sppo.data.preparation.tokenizer_file import FileTokenizer
from sppo.units import counted

MOST_KEYS = 256
_ADJECTIVES = (
    *("amber", "brave", "calm", "crisp", "dusty", "eager", "faint", "gentle"),
    *("hollow", "icy", "jolly", "keen", "lively", "mellow", "narrow", "olive"),
    *("plain", "quick", "rapid", "silent", "tidy", "urban", "vivid", "woolly"),
)
_NOUNS = (
    *("anchor", "basket", "candle", "desert", "engine", "falcon", "garden", "harbor"),
    *("island", "jacket", "kettle", "ladder", "meadow", "needle", "orchard", "pillow"),
    *("quarry", "ribbon", "saddle", "temple", "umbrella", "valley", "window", "yard"),
)
_INTRODUCTION = (
    "Special magic numbers are hidden in the text below. Remember them: at the end you are asked "
    "for one.\n\n"
)
_NEEDLE = "\nThe special magic number for {key} is: {value}.\n"
_QUESTION = "\n\nWhat is the special magic number for {key} in the text above?"
_ANSWER = "The special magic number for {key} is: {value}"
_PLACE = "THE-HAYSTACK-STANDS-HERE"
"""Stands for the haystack while a chat template makes text of the rest."""
_HAYSTACKS = 4
"""Tokens of haystack that are read, in multiples of the longest document, so that documents begin
at different places of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needles:
    """Documents with a needle that are asked for: some of each length and depth."""

    lengths: Sequence[int]
    """Numbers of tokens of a document."""
    depths: Sequence[int]
    """Shares of the haystack before the value that is asked for, in percent."""
    keys: int = 1
    """Number of values hidden in each document."""
    per_cell: int = 1
    """Number of documents of each length and depth."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleData:
    """Summary of needle data that was written, or existed already with the same documents."""

    directory: str
    unchanged: bool
    """True if the directory already held exactly these documents, so that nothing was written."""
    num_documents: int
    num_tokens: int
    num_counting_tokens: int
    """Number of tokens of all answers."""


def prepare_needles(
    haystack: Sequence[Path],
    needles: Needles,
    *,
    tokenizer: str,
    out: Path,
    globs: Sequence[str] = (),
    chat: bool = False,
    chat_template: str | None = None,
    force: bool = False,
) -> NeedleData:
    """Write needle documents into the token directory ``out``; on an error the disk is unchanged.

    Args:
        haystack: Files and directories of text; see :func:`.documents.find_files`.
        needles: Documents to write.
        tokenizer: ``bytes``, or the path of a ``tokenizer.json``.
        out: Directory to write; created only when it is complete.
        globs: Patterns for files below directories.
        chat: Write the text and the question as a message of the user.
        chat_template: Path of the template of chats, or ``chatml``; None for the tokenizer's own.
        force: Replace token data that is already at ``out``.

    Raises:
        ValueError: An input, an option or the destination is wrong; the user can correct it.
        OSError: The disk is full or failed.
    """
    out = Path(out).resolve()
    check_destination(out, force=force)
    if tokenizer == "ids":
        raise ValueError("--tokenizer ids: needles are text; give bytes, or a tokenizer.json")
    paths = find_files([Path(path) for path in haystack], globs=globs, exclude=out)
    chosen = choose_tokenizer(tokenizer, paths=paths, vocab_size=None, end_of_document="none")
    assert not isinstance(chosen, IdsTokenizer), "refused above"
    check_text_files(paths)
    template = _template(tokenizer, chosen, chat=chat, option=chat_template)
    text = read_haystack(paths, chosen, most=_HAYSTACKS * max(needles.lengths))
    with destination(out, chosen, force=force) as place:
        documents = _Documents(text, chosen, template)
        cells, answers = _write(place.writer, needles, documents)
        described = {} if template is None else {"chat_template_sha256": template.sha256}
        place.finish(chosen, template, **described)
        write_cells(place.temporary, Cells(needles.keys, needles.seed, tuple(cells)))
        place.keep()
    return NeedleData(
        directory=str(out),
        unchanged=place.existing is not None,
        num_documents=len(cells),
        num_tokens=place.writer.num_tokens,
        num_counting_tokens=answers,
    )


def _template(
    name: str, tokenizer: TextTokenizer, *, chat: bool, option: str | None
) -> ChatTemplate | None:
    """Return the template of chats; None if documents are no chats."""
    if not chat:
        if option is not None:
            raise ValueError(f"--chat-template {option}: only with --chat; leave it out, or add it")
        return None
    if not isinstance(tokenizer, FileTokenizer):
        raise ValueError(
            f"--tokenizer {name}: --chat needs the special tokens of a tokenizer.json; give its "
            "path"
        )
    return ChatTemplate.load(name, option)


def _write(writer: TokenWriter, needles: Needles, documents: _Documents) -> tuple[list[Cell], int]:
    """Append all documents; return their cells and the number of tokens of their answers."""
    cells: list[Cell] = []
    answers = 0
    for length, depth, number in product(
        sorted(set(needles.lengths)), sorted(set(needles.depths)), range(needles.per_cell)
    ):
        # Of its own for each document: other lengths and depths do not change it.
        draw = random.Random(f"{needles.seed} {length} {depth} {number}")
        keys, values = _keys(draw, needles.keys), _values(draw, needles.keys)
        ids, counts = documents.make(draw, length=length, depth=depth, keys=keys, values=values)
        cells.append(Cell(len(cells), length, depth, keys[0], values[0]))
        answers += int(np.count_nonzero(counts))
        writer.append(ids, counts)
        writer.end_document()
    return cells, answers


def _keys(draw: random.Random, count: int) -> list[str]:
    pairs = draw.sample(range(len(_ADJECTIVES) * len(_NOUNS)), count)
    return [f"{_ADJECTIVES[n // len(_NOUNS)]}-{_NOUNS[n % len(_NOUNS)]}" for n in pairs]


def _values(draw: random.Random, count: int) -> list[str]:
    return [str(value) for value in draw.sample(range(1_000_000, 10_000_000), count)]


@dataclass(frozen=True, slots=True, eq=False)
class _Documents:
    """Tokenizer, haystack and template of which needle documents are made."""

    haystack: Haystack
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    """Template of chats; None for plain text."""

    def make(
        self,
        draw: random.Random,
        *,
        length: int,
        depth: int,
        keys: Sequence[str],
        values: Sequence[str],
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the tokens of a document, and which of them are its answer, both [length].

        The first key is asked for; the other ones stand at places that `draw` chooses.

        Raises:
            ValueError: The haystack is too short, or the length.
        """
        before, after = self._around(keys[0], values[0])
        head, _ = self._encoded(before)
        tail, is_answer = self._encoded(after, trained=len(values[0]))
        hidden = [
            self._encoded(_NEEDLE.format(key=key, value=value))[0]
            for key, value in zip(keys, values, strict=True)
        ]
        around = len(head) + len(tail) + sum(map(len, hidden))
        _check_room(length, around=around, haystack=len(self.haystack.ids), keys=len(keys))
        text = self.haystack.cut(length - around, start=draw.random())
        shares = [depth / 100, *(draw.random() for _ in keys[1:])]
        places = [text.place(share) for share in shares]
        parts, done = [head], 0
        for place, needle in sorted(zip(places, hidden, strict=True), key=itemgetter(0)):
            parts += [text.ids[done:place], needle]
            done = place
        ids = np.concatenate([*parts, text.ids[done:], tail])
        assert len(ids) == length, "the haystack fills what is left"
        counts = np.zeros(length, dtype=np.bool_)
        counts[length - len(tail) :] = is_answer
        return ids, counts

    def _around(self, key: str, value: str) -> tuple[str, str]:
        """Return the text before and after the haystack, the answer included."""
        question, answer = (text.format(key=key, value=value) for text in (_QUESTION, _ANSWER))
        if self.template is None:
            return _INTRODUCTION, f"{question} {answer}"
        rendered = self.template.question(f"{_INTRODUCTION}{_PLACE}{question}")
        before, *after = rendered.split(_PLACE)
        if len(after) != 1:
            raise ValueError(
                f"{self.template.name}: the template does not write a message of the user once and "
                "as it is; give another --chat-template, or leave --chat out"
            )
        return before, after[0] + answer

    def _encoded(
        self, text: str, *, trained: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the ids of a text, and which of them have any of its last characters."""
        marked = MarkedText(text, ((len(text) - trained, len(text)),))
        ((ids, counts),) = self.tokenizer.encode_texts([marked])
        assert counts is not None, "a span is marked"
        return ids.astype(np.int64), counts


def _check_room(length: int, *, around: int, haystack: int, keys: int) -> None:
    """Raise ValueError unless a document has room for a haystack, and the haystack fills it."""
    if length <= around:
        raise ValueError(
            f"--lengths {length}: {counted(keys, 'needle')}, the question and the answer have "
            f"{around} tokens; give lengths above that"
        )
    if haystack < length - around:
        raise ValueError(
            f"--haystack: its files have {haystack} tokens, and a document of {length} has room "
            f"for {length - around}; give more text, or shorter --lengths"
        )
