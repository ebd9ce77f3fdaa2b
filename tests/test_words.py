"""Retired words stay retired, in names, docstrings, comments, messages and documents.

`docs/glossary.md` defines the words of today. Names are looked at part by part (``gang_size`` has
``gang``), comments, strings and documents phrase by phrase, across line breaks.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

NAMES = {
    "parcel": "block",
    "parcels": "blocks",
    "itinerary": "offload_schedule",
    "gang": "msp_group",
    "gangs": "msp_groups",
    "everyones": "all_gather",
    "companions": "parallel_context",
    "patience": "timeout",
    "situation": "inputs",
    "decisions": "placement",
    "assess": "evaluate",
    "assessed": "evaluated",
    "assessment": "evaluated",
    "assessments": "evaluated candidates",
    "rebuilt": "recomputed",
    "rebuilds": "recomputes",
    "rebuilding": "recomputing",
    "picture": "plot",
    "pictures": "plots",
    "ticket": "transfer",
    "tickets": "transfers",
    "books": "account",
    "movable": "offloadable",
    "courier": "p2p",
    "hurried": "overlaps_compute",
}
"""Parts of identifiers, and what is said today."""

PHRASES = {
    r"parcels?": "block",
    r"itinerar(?:y|ies)": "offload schedule",
    r"gangs?": "MSP group",
    r"everyones": "all-gather",
    r"rebuil(?:t|ds|ding)": "recomputed, recomputes, recomputing",
    r"attend(?:s|ing)? again": "recompute attention",
    r"moved (?:tensors?|activations?|rows)": "offloaded",
    r"shared out|shares? out|sharing out": "sharded, or divided",
    r"pictures?": "plot",
    r"wider? (?:dtype|type)s?": "accumulation dtype",
    r"couriers?": "p2p, or pipeline communication",
    r"companions?": "exchange",
    r"(?:runs?|ranks of the other|MSP) pieces": "MSP shards",
    r"tickets?": "transfer, or future",
    r"(?:keeps?|the) books": "account",
    r"GPUs? that (?:is|are) not there": "fake GPU",
    r"worker lanes?|lane's thread": "worker queue",
}
"""Phrases of prose and messages, without case, and what is said today."""

STAYS = {
    "kept, moved, rebuilt": "keys of the rows in plan files",
    '"rebuilt"': "key of plan files",
    "--picture": "command-line name of scripts",
    "docs/pictures": "folder of the README's plots",
    "](pictures/": "the same, seen from docs",
    "](../pictures/": "the same, seen from folders of docs",
    "`rebuilt`": "key of plan files, in the reference",
}
"""Text that stays as it is, and why."""

NAMES_STAY = {"picture": "scripts: what argparse makes of --picture"}
"""Identifiers that stay, and why; in `scripts` alone."""


_LOWER = [re.compile(pattern.lower()) for pattern in (*NAMES, *PHRASES)]


class Finding(NamedTuple):
    """One retired word, where it stands, and what is said today."""

    place: str
    word: str
    today: str


def _flat(text: str) -> str:
    """``text`` in one line, comments without their signs."""
    return re.sub(r"[\s#]+", " ", text)


def _phrases(text: str, place: str) -> Iterator[Finding]:
    for allowed in STAYS:
        text = text.replace(allowed, "")
    flat = _flat(text)
    for phrase, today in PHRASES.items():
        for found in re.finditer(rf"(?<![\w.]){phrase}(?!\w)", flat, re.IGNORECASE):
            yield Finding(place, found[0], today)


def _may_have(source: str) -> bool:
    """Whether ``source`` must be parsed, which takes much longer than this look at it."""
    text = _flat(source.lower())
    return any(pattern.search(text) for pattern in _LOWER)


def _in_python(source: str, place: str) -> Iterator[Finding]:
    if not _may_have(source):
        return
    comments: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and not (
            token.string in NAMES_STAY and place.startswith("scripts/")
        ):
            for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", token.string):
                if part.lower() in NAMES:
                    yield Finding(f"{place}:{token.start[0]}", token.string, NAMES[part.lower()])
        elif token.type == tokenize.STRING:
            yield from _phrases(token.string, f"{place}:{token.start[0]}")
        elif token.type == tokenize.COMMENT:
            comments.append(token.string)
    yield from _phrases("\n".join(comments), place)


def findings(path: Path) -> list[Finding]:
    """Return every retired word in a file."""
    place, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    return list(_in_python(text, place) if path.suffix == ".py" else _phrases(text, place))


def _files() -> list[Path]:
    patterns = ("sppo/**/*.py", "scripts/*", "docs/**/*.md", "README.md", "tests/**/*.py")
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.suffix in (".py", ".sh", ".md"))


def test_retired_words_are_not_used():
    """The list itself is the one file that has them."""
    files = [path for path in _files() if path != Path(__file__)]
    assert len(files) > 300
    found = [finding for path in files for finding in findings(path)]
    assert not found, "\n".join(f"{f.place}: {f.word!r}: say {f.today}" for f in found)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("gang_size = 1", "gang_size"),
        ("class ParcelShape: ...", "ParcelShape"),
        ('"""Where the moved\n    tensors lie."""', "moved tensors"),
        ("# shares are handed\n# out: weights are shared\n# out evenly", "shared out"),
        ('raise ValueError(f"{x} was rebuilt")', "rebuilt"),
        ("self._courier = decide()", "_courier"),
        ("x = 1  # Attends again.", "Attends again"),
        ("def wait(last_ticket): ...", "last_ticket"),
        ("# Both threads keep books.", "keep books"),
    ],
)
def test_a_retired_word_is_found(source, word):
    assert [finding.word for finding in _in_python(source, "sppo/x.py")] == [word]


def test_other_words_are_not_found():
    kept = 'moved = share(pieces)  # a wide row; "kept, moved, rebuilt" are keys'
    assert not list(_in_python(kept, "sppo/x.py"))
