"""Damage for input files: seeded changes of values, of JSON trees and of bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

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


_WORDS = ("0", "-1", "1", "2", "3", "1000000", "9" * 10, "9" * 31, "x", "", "\u00b2", "9" * 5000)


def nasty(rng: random.Random) -> Any:
    """Return a value that programs stumble over."""
    return copy.deepcopy(rng.choice(NASTY))


def changed_tree(rng: random.Random, tree: Any, *, changes: int = 3) -> Any:
    """Return a copy of a JSON tree with up to `changes` values, keys or items replaced."""
    holder = {"": copy.deepcopy(tree)}
    for _ in range(rng.randint(1, changes)):
        _change_once(rng, holder)
    return holder[""]


def _change_once(rng: random.Random, holder: dict[str, Any]) -> None:
    spots: list[tuple[Any, Any]] = list(_spots(holder[""]))
    place, key = rng.choice(spots) if spots and rng.random() < 0.98 else (holder, "")
    action = rng.random()
    if action < 0.6:
        place[key] = nasty(rng)
    elif action < 0.7 and isinstance(place[key], (int, float)):
        place[key] = place[key] * rng.choice((-1, 0, 2, 0.5, 1e6, 1e-6)) + rng.choice((-1, 0, 1))
    elif action < 0.8:
        other, where = rng.choice(spots) if spots else (holder, "")
        place[key] = copy.deepcopy(other[where])
    elif action < 0.9 and place is not holder:
        del place[key]
    elif isinstance(place, dict):
        place[str(nasty(rng))] = nasty(rng)
    else:
        place.insert(0, nasty(rng))


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending:
        place = pending.pop()
        keys: Any = ()
        if isinstance(place, (dict, list)):
            keys = list(place) if isinstance(place, dict) else range(len(place))
        for key in keys:
            found.append((place, key))
            if isinstance(place[key], (dict, list)):
                pending.append(place[key])
    return found


def json_text(tree: Any) -> str:
    """Return `tree` as JSON, raw values written as they are."""
    text = json.dumps(tree)
    marker = json.dumps(_RAW)[1:-1]
    while marker in text:
        start = text.index(f'"{marker}')
        end = start + 1
        while text[end] != '"' or text[end - 1] == "\\":
            end += 1
        raw = json.loads(text[start : end + 1])[len(_RAW) :]
        text = text[:start] + raw + text[end + 1 :]
    return text


def changed_bytes(rng: random.Random, data: bytes, *, changes: int = 3) -> bytes:
    """Return `data` with up to `changes` bits flipped, or slices cut, doubled or replaced."""
    words = (
        b"9" * 30,
        b"-1",
        b"\0",
        b"\xff\xfe",
        b"(",
        b"[" * 50,
        b"NaN",
        b": ",
        b"\n",
        b"'",
        b"e",
    )
    for _ in range(rng.randint(1, changes)):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((1, 1, 2, 8, 64)))
        action = rng.random()
        if action < 0.4 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif action < 0.55:
            data = data[:at] + data[to:]
        elif action < 0.65:
            data = data[:to] + data[at:to] * rng.choice((1, 1, 50)) + data[to:]
        elif action < 0.75:
            data = data[:at]
        elif action < 0.9:
            data = data[:at] + rng.choice(words) + data[at:]
        else:
            data = data[:at] + rng.randbytes(to - at) + data[to:]
    return data


def changed_words(rng: random.Random, text: str, *, changes: int = 3) -> str:
    """Return `text` with up to `changes` of its words, or numbers in them, replaced."""
    for _ in range(rng.randint(1, changes)):
        words = text.split(" ")
        at = rng.randrange(len(words))
        action = rng.random()
        if action < 0.4:
            words[at] = str(
                rng.choice((0, -1, 1, 2, 3, 10**6, 10**9, 10**30, "x", "", "²", "9" * 5000))
            )
        elif action < 0.6:
            digits = [i for i, c in enumerate(words[at]) if c.isdigit()]
            if digits:
                i = rng.choice(digits)
                new = rng.choice(("0", "1", "2", "9", "99999999999", ""))
                words[at] = words[at][:i] + new + words[at][i + 1 :]
        elif action < 0.75:
            words.insert(at, rng.choice(words))
        elif action < 0.9:
            del words[at]
        else:
            words[at] = changed_bytes(rng, words[at].encode(), changes=1).decode("latin-1")
        text = " ".join(words)
    return text
