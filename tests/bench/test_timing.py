"""The clock: rounds over all cases, medians, warm calls."""

from __future__ import annotations

import pytest

from sppo.bench import timing
from sppo.bench.timing import Rounds, TimedCase, Timing, time_cases, time_once


class Machine:
    """A clock that only calls advance, and what was called."""

    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def case(self, key, *seconds):
        """A case that takes each of ``seconds`` in turn, one per round."""
        rounds = iter(seconds)

        def make():
            takes = next(rounds)
            self.log.append(f"make {key}")

            def call():
                self.log.append(key)
                self.now += takes

            return call

        return TimedCase(key, make)


class Watcher:
    def __init__(self):
        self.begun, self.advanced = [], 0

    def begin(self, subject, *, total):
        self.begun.append((subject, total))

    def advance(self):
        self.advanced += 1


def test_all_cases_take_turns(monkeypatch):
    machine, watcher = Machine(monkeypatch), Watcher()
    cases = [machine.case("a", 1.0, 5.0, 1.2), machine.case("b", 2.0, 2.0, 2.0)]
    found = time_cases(cases, rounds=Rounds("cpu", count=3, window_s=0.0), watcher=watcher)
    made = [line for line in machine.log if line.startswith("make")]
    assert made == ["make a", "make b"] * 3
    assert found["a"] == Timing(pytest.approx(1.2), pytest.approx(1.0), pytest.approx(5.0))
    assert found["a"].spread == pytest.approx(4 / 1.2)
    assert found["b"].median_s == pytest.approx(2.0)
    assert watcher.advanced == 6


def test_short_calls_are_warmed_up_and_repeated(monkeypatch):
    machine = Machine(monkeypatch)
    cases = [machine.case("a", 0.001, 0.001)]
    rounds = Rounds("cpu", count=2, window_s=0.01)
    found = time_cases(cases, rounds=rounds, watcher=Watcher())
    assert found["a"].median_s == pytest.approx(0.001)
    # Once to warm up and once to see how long it is, then a window; the second round knows that.
    assert machine.log.count("a") == pytest.approx((2 + 10) + (1 + 10), abs=2)


def test_long_calls_are_not_repeated(monkeypatch):
    machine = Machine(monkeypatch)
    rounds, watcher = Rounds("cpu", count=4, count_long=3, window_s=0.01), Watcher()
    time_cases([machine.case("a", 1.0, 1.0, 1.0)], rounds=rounds, watcher=watcher)
    assert machine.log.count("a") == 3 + 1 + 1
    assert watcher.advanced == 4


def test_one_call_is_measured_warm(monkeypatch):
    machine = Machine(monkeypatch)
    takes = iter([9.0, 0.5])
    assert time_once(lambda: setattr(machine, "now", machine.now + next(takes)), device="cpu") == (
        0.5
    )


def test_keys_are_unique(monkeypatch):
    machine = Machine(monkeypatch)
    with pytest.raises(AssertionError, match="a key of its own"):
        time_cases(
            [machine.case("a", 1.0), machine.case("a", 1.0)],
            rounds=Rounds("cpu"),
            watcher=Watcher(),
        )
