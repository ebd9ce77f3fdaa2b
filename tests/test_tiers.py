"""List of tests left out of the default tier: its tests exist, and every kind keeps a test."""

from __future__ import annotations

import ast
import itertools
from functools import cache
from pathlib import Path

import pytest

from tests import tiers
from tests.conftest import IDLE_TIER_RULES
from tests.tiers import RULES, each, idle_parts, only, pairs, replaced, staying, without

TESTS = Path(__file__).parent
GRID = [
    (f"{a}-{b}-{c}", {"a": a, "b": b, "c": c}) for a, b, c in itertools.product("123", "xy", "uvw")
]


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("test", RULES)
def test_it_names_tests_that_there_are(test):
    for name in (test, *RULES[test].by):
        file, _, function = name.partition("::")
        assert function in functions_of(file), f"{name}: moved or renamed; tests/tiers.py names it"


@pytest.mark.parametrize("test", RULES)
def test_every_entry_says_why_and_what_stands_for_it(test):
    rule = RULES[test]
    assert rule.why
    stays = rule.strength or rule.keep or rule.drop
    assert stays or rule.by, "no case stays, and no test stands for it"
    for name in rule.by:
        other = RULES.get(name)
        assert other is None or other.strength or other.keep or other.drop, f"{name} leaves, too"


def test_each_keeps_every_value():
    kept = [GRID[i][1] for i in staying(each("test"), GRID)]
    assert len(kept) == 3
    for name, values in {"a": "123", "b": "xy", "c": "uvw"}.items():
        assert {case[name] for case in kept} == set(values)


def test_pairs_keeps_every_two_values_that_meet():
    some = [case for case in GRID if case[1] != {"a": "1", "b": "x", "c": "u"}]
    kept = [some[i][1] for i in staying(pairs("test"), some)]
    assert len(kept) < len(some) - 5
    for one, other in itertools.combinations("abc", 2):
        met = {(case[one], case[other]) for case in kept}
        assert met == {(case[one], case[other]) for _, case in some}


def test_fewer_examples_are_drawn_in_the_default_tier(request, monkeypatch):
    assert tiers.default_tier is ("not exhaustive" in request.config.option.markexpr)
    monkeypatch.setattr(tiers, "default_tier", True)
    assert tiers.examples(5, all=20) == 5
    monkeypatch.setattr(tiers, "default_tier", False)
    assert tiers.examples(5, all=20) == 20


def test_every_rule_and_pattern_leaves_something_out_or_keeps_it(request):
    """Looks at the tests that were collected with this one, so at all of them in CI."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single cases were asked for, and patterns may be about the others")
    idle = request.config.stash[IDLE_TIER_RULES]
    assert not idle, "tests/tiers.py says what changes nothing: take it out, or mend it"


@pytest.mark.parametrize(
    ("rule", "idle"),
    [
        (only("1-x-u", "4-*", "2-*", why="test"), ["4-*"]),
        (without("1-x-u", "1-z-*", why="test"), ["1-z-*"]),
        (without("4-*", why="test"), ["4-*", "every case stays"]),
        (only("*", why="test"), ["every case stays"]),
        (each("test"), []),
        (replaced("x.py::test_y", why="test"), []),
    ],
)
def test_parts_of_a_rule_that_change_nothing(rule, idle):
    assert idle_parts(rule, GRID) == idle


def test_a_single_case_stays():
    assert staying(pairs("test"), GRID[:1]) == staying(each("test"), GRID[:1]) == {0}


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (only("1-x-u", "2-*", why="test"), 7),
        (without("1-x-u", "2-*", why="test"), 11),
        (replaced("x.py::test_y", why="test"), 0),
        (without("[1-x-u]", why="test"), 18),
    ],
)
def test_cases_by_their_ids(rule, kept):
    assert len(staying(rule, GRID)) == kept
