"""Quoted values stay on one line, short, and cost nothing however large the value is."""

from __future__ import annotations

import time

import pytest

from sppo.quoting import QUOTE_CHARACTERS, one_line, quoted, readable


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, "\n\x1b[31m\r\0", "\ud800" * 500, 10**5000, -(10**5000), deep(100_000),
     {str(n): n for n in range(10**5)}, [[["a" * 99] * 99] * 99] * 99, b"\n" * 10**5],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_any_value_is_one_short_line(value):
    start_s = time.process_time()
    text = quoted(value)
    assert time.process_time() - start_s < 1
    assert text.isprintable()
    assert len(text) <= QUOTE_CHARACTERS


def test_short_values_are_whole():
    assert quoted("gelu") == "'gelu'"
    assert quoted({"a": [1, 2.5, None]}) == "{'a': [1, 2.5, None]}"
    assert one_line("a b/c.json") == "a b/c.json"


def test_what_is_cut_keeps_its_ends():
    text = one_line("/first/" + "x" * 500 + "/last.json")
    assert text.startswith("/first/")
    assert text.endswith("/last.json")
    assert "..." in text


def test_a_message_keeps_its_lines():
    assert readable("run.yaml has 1 problem\n  a\x07  b") == "run.yaml has 1 problem\n  a\\x07  b"
    assert len(readable("x" * 10**6)) <= 2000
