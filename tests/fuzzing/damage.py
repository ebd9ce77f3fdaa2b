"""Damage for input files, as hypothesis strategies: of values, of JSON trees, of bytes and text."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from hypothesis import strategies as st

_RAW = "\x01raw:"
"""Start of a string that is written into JSON as the bare text behind it."""

NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 65535, 1 << 31, 1 << 53, 1 << 63, -(1 << 70), 10**30,
    0.0, -0.0, 0.5, 1.5, -1.5, 1e-300, 5e-324, 1e30, 1e300, "", "x", "auto", "4Mi", "1e9", "0x10",
    "\0", "\n\x1b[31m", "\ud800", "é" * 50, "x" * 5000, "../..", "/dev/null", [], {}, [[]],
    [0], [None], {"": None}, {"a": 1}, ["gelu"], "NaN", f"{_RAW}NaN", f"{_RAW}Infinity",
    f"{_RAW}-Infinity", f"{_RAW}1e400", f"{_RAW}1{'0' * 400}", f"{_RAW}{'9' * 5000}",
    f"{_RAW}{'[' * 300}{']' * 300}", f"{_RAW}{'[' * 20000}", f'{_RAW}{{"a": 1, "a": 2}}',
)  # fmt: skip
BYTES = (b"", b"9" * 30, b"-1", b"\0", b"\xff\xfe", b"(", b"[" * 50, b"NaN", b": ", b"\n", b"'")
WORDS = ("0", "-1", "1", "2", "3", "1000000", "9" * 10, "9" * 31, "x", "", "\u00b2", "9" * 5000)

nasty = st.sampled_from(NASTY).map(copy.deepcopy)
"""Values that programs stumble over."""


@st.composite
def changed_trees(draw: st.DrawFn, tree: Any, *, changes: int = 3) -> Any:
    """JSON trees with up to `changes` values, keys or items replaced, copied, removed or added."""
    holder = {"": copy.deepcopy(tree)}
    for _ in range(draw(st.integers(1, changes))):
        spots = _spots(holder)
        place, key = draw(st.sampled_from(spots))
        other, where = draw(st.sampled_from(spots))
        change = draw(st.sampled_from(("replace", "replace", "scale", "copy", "delete", "insert")))
        if change == "scale" and isinstance(place[key], (int, float)):
            place[key] *= draw(st.sampled_from((-1, 0, 2, 0.5, 1e6, 1e-6)))
        elif change == "copy":
            place[key] = copy.deepcopy(other[where])
        elif change == "delete" and place is not holder:
            del place[key]
        elif change == "insert" and place is not holder:
            if isinstance(place, dict):
                place[str(draw(nasty))] = draw(nasty)
            else:
                place.insert(0, draw(nasty))
        else:
            place[key] = draw(nasty)
    return holder[""]


def _spots(place: Any) -> list[tuple[Any, Any]]:
    """Every container of a tree with each of its keys or positions."""
    keys: Any = ()
    if isinstance(place, (dict, list)):
        keys = list(place) if isinstance(place, dict) else range(len(place))
    return [spot for key in keys for spot in ((place, key), *_spots(place[key]))]


def json_text(tree: Any) -> str:
    """Return `tree` as JSON, raw values written as they are."""
    marker = re.escape(json.dumps(_RAW)[1:-1])
    raw = re.compile(rf'"{marker}((?:[^"\\]|\\.)*)"')
    return raw.sub(lambda found: json.loads(f'"{found[1]}"'), json.dumps(tree))


def changed_json(tree: Any, *, changes: int = 3) -> st.SearchStrategy[str]:
    """JSON of changed trees."""
    return changed_trees(tree, changes=changes).map(json_text)


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes, *, changes: int = 3) -> bytes:
    """`data` with up to `changes` slices cut, repeated or replaced, or its end cut off."""
    for _ in range(draw(st.integers(1, changes))):
        at = draw(st.integers(0, len(data)))
        to = at + draw(st.sampled_from((0, 1, 2, 8, 64, len(data))))
        repeated = data[at : at + 64] * draw(st.sampled_from((1, 2, 50)))
        new = draw(st.sampled_from(BYTES) | st.binary(max_size=8) | st.just(repeated))
        data = data[:at] + new + data[to:]
    return data


@st.composite
def changed_words(draw: st.DrawFn, text: str, *, changes: int = 3) -> str:
    """`text` with up to `changes` of its words removed, repeated, replaced or changed."""
    for _ in range(draw(st.integers(1, changes))):
        words = text.split(" ")
        at = draw(st.integers(0, len(words) - 1))
        changed = changed_bytes(words[at].encode(), changes=1).map(lambda b: b.decode("latin-1"))
        new = draw(st.sampled_from(WORDS) | st.sampled_from(words) | changed)
        words[at : at + draw(st.integers(0, 1))] = [new] * draw(st.sampled_from((1, 1, 1, 0)))
        text = " ".join(words)
    return text
